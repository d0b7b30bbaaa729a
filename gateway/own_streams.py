"""The streams of this gateway's own requests, for clients that read them back here: no reading of the log.

The owner has folded them already, and what it reads next is given to who reads them again as well.
"""

import json
import time
from array import array
from collections import OrderedDict
from collections.abc import Mapping

from aiokafka import ConsumerRecord

from gateway.owned_request import OwnedRequest
from gateway.owner import Owner
from gateway.partition_scan import PartitionScan
from gateway.replay import StreamFold
from schemas.stream_state import DEADLINE_EXCEEDED

# Of requests that ended here.
_ENDED_KEPT_S = 60.0
_ENDED_BYTES = 32 << 20
_REQUEST_BYTES = 2_000  # of one, beside its tokens


class OwnStreams:
    """`positions`: what lies before, in each reply partition of this gateway, was given to `owner`.

    `feeds` stand where the owner does: call `on_record` when it was given a record.
    """

    def __init__(self, owner: Owner, positions: Mapping[int, int]) -> None:
        self.feeds = {partition: PartitionScan(partition, offset) for partition, offset in positions.items()}
        self._owner = owner
        self._ended: OrderedDict[bytes, tuple[OwnedRequest, array[int], float]] = OrderedDict()
        self._num_bytes = 0

    def on_record(self, record: object, message: ConsumerRecord) -> None:
        self.feeds[message.partition].on_record(record, message.offset, message.timestamp, time.monotonic())

    def fold(
        self, request_id: bytes, tenant: str, partition: int, first_offset: int, now: float
    ) -> StreamFold | None:
        """Where the feed of `partition` stands; None for what this gateway does not know in full.

        That is what it did not accept itself, log probabilities, and all while it may have missed a takeover.
        """
        feed = self.feeds.get(partition)
        if feed is None or feed.position is None or not self._owner.feel(now):
            return None
        ended = self._ended.get(request_id)
        owned = self._owner.open.get(request_id) if ended is None else ended[0]
        if owned is None or not owned.stream_id or owned.request.sampling.logprobs is not None:
            return None
        if owned.described and owned.description is None:
            return None
        request, state = owned.request, owned.state
        if (request.tenant, request.reply_partition) != (tenant, partition):
            return None
        if first_offset > owned.first_offset:
            return None
        fold = StreamFold(
            request_id, tenant, state.copy(list(state.token_ids if ended is None else ended[1]))
        )
        fold.created = None if owned.description is None else json.loads(owned.description)
        fold.waived = owned.waived
        fold.caught_up = True
        fold.position = feed.position
        if ended is not None:
            fold.settle()
        elif state.end is not None:
            fold.ended_at = state.last_sign_at
        # Of what did not end in its time a Failed is the end, behind that of the attempt.
        if owned.cancelled not in (None, DEADLINE_EXCEEDED) and owned.retrying is None:
            fold.stop()
        return fold

    def on_over(self, owned: OwnedRequest) -> None:
        """It has ended; its output is still there."""
        request, state = owned.request, owned.state
        feed = self.feeds.get(request.reply_partition)
        if feed is None or state.end is None:
            return
        for fold in feed.folds.get(request.request_id, ()):
            fold.stop()  # no retry follows
        if owned.stream_id:
            output = array("I", state.token_ids)
            self._ended[request.request_id] = owned, output, time.monotonic()
            self._num_bytes += _REQUEST_BYTES + output.itemsize * len(output)
            if self._num_bytes > _ENDED_BYTES:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, (_, output, _) = self._ended.popitem(last=False)
        self._num_bytes -= _REQUEST_BYTES + output.itemsize * len(output)

    def tick(self, now: float, clock_ms: int) -> None:
        """Ten times a second. `now`: monotonic s; `clock_ms`: the log's clock."""
        while self._ended and now - next(iter(self._ended.values()))[2] >= _ENDED_KEPT_S:
            self._drop_oldest()
        for feed in self.feeds.values():
            if feed.folds:
                feed.tick(now, clock_ms)
