"""What makes an idempotent producer of aiokafka outlast whatever its brokers do.

An idempotent producer numbers its batches, by partition, and the broker refuses for good whatever follows a
number that it never got. aiokafka (0.14) leaves such gaps in two ways, and does not close them:

- A broker that shuts down says that its partitions have no leader. Who asked then knows nothing else until
  the broker is back, and a batch that waited longer than `request_timeout_ms` is numbered and thrown away.
- So is one that the broker refuses for what it holds, as one that is too large.
"""

import asyncio
import logging
import math
from typing import Any, TypeVar

log = logging.getLogger(__name__)

P = TypeVar("P")
_NONE = -1


def lasting(producer: P) -> P:
    """`producer`, an AIOKafkaProducer not started yet, idempotent and without transactions. From here on

    - what it has taken waits for the brokers as long as they are away: no batch expires. Who waits for an ack
      sets a deadline, behind which the record may still arrive;
    - when a batch fails for good, all that follow are numbered anew under a new producer id. What failed is
      its sender's to send again.
    """
    kafka: Any = producer
    # An expired batch is the only one that aiokafka fails by itself.
    kafka._message_accumulator._batch_ttl = math.inf
    _Numbering(kafka._sender)
    return producer


class _Numbering:
    """The producer id of one aiokafka `Sender`, whose calls for ids and for sends it stands before."""

    def __init__(self, sender: Any) -> None:
        self._sender, self._manager = sender, sender._txn_manager
        self._send, self._ask_for_id = sender._send_produce_req, sender._do_init_pid
        self._had_id = False
        sender._send_produce_req = self._send_and_look
        sender._do_init_pid = self._ask_until_answered

    async def _send_and_look(self, node_id: int, batches: dict[Any, Any]) -> None:
        await self._send(node_id, batches)
        # The partitions of these batches were closed to others until now, and nothing runs before the next
        # await: what follows them gets its numbers behind this. One in flight to another keeps its own.
        if any(batch.future.done() and batch.future.exception() for batch in batches.values()):
            log.warning("records were refused; those that follow get a new producer id")
            self._forget_id()

    def _forget_id(self) -> None:
        manager = self._manager
        manager._pid_and_epoch = manager._pid_and_epoch._replace(pid=_NONE, epoch=_NONE)
        manager._pid_waiter = asyncio.get_running_loop().create_future()
        manager._sequence_numbers.clear()

    async def _ask_until_answered(self, node_id: int | None) -> bool:
        try:
            got: bool = await self._ask_for_id(node_id)
        except Exception as error:
            if not self._had_id:
                raise  # the start's, whose caller is told
            # It would end the sender, and with it all that is ever given to the producer.
            log.warning("no producer id yet", extra={"error": repr(error)})
            await asyncio.sleep(self._sender._retry_backoff)
            return False
        self._had_id = self._had_id or got
        return got
