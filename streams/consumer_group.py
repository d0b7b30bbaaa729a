"""Puts members that died out of a consumer group, before their session ends."""

import logging
from collections.abc import Callable
from typing import Any

from aiokafka import AIOKafkaClient
from aiokafka.client import CoordinationType
from aiokafka.errors import UnknownMemberIdError, for_code
from aiokafka.protocol.admin import DescribeGroupsRequest
from aiokafka.protocol.group import LeaveGroupRequest

from schemas.kafka_login import client_settings

log = logging.getLogger(__name__)


class ConsumerGroup:
    """One group, seen from outside. `client` is an AIOKafkaClient, started by `start`."""

    def __init__(self, name: str, bootstrap_servers: str, client_id: str) -> None:
        self._name = name
        self._client = AIOKafkaClient(**client_settings(bootstrap_servers), client_id=client_id)

    async def start(self) -> None:
        await self._client.bootstrap()

    async def stop(self) -> None:
        await self._client.close()

    async def put_out(self, client_id: str, is_over: Callable[[], bool]) -> bool:
        """Whether no member has that client id any more. The caller sets a deadline.

        `is_over` is asked again before a member is put out: a process that came meanwhile has the same id.
        Raises KafkaError, if the group's coordinator cannot be asked or refuses.
        """
        # Found anew each time: it is rare, and the coordinator may have moved.
        await self._client.force_metadata_update()
        node = await self._client.coordinator_lookup(CoordinationType.GROUP, self._name)
        response = await self._client.send(node, DescribeGroupsRequest([self._name]))
        ((error, _, _, _, _, members, *_),) = response.groups
        _check(error)
        for member_id in (member for member, client, *_ in members if client == client_id):
            if not is_over():
                return False
            left = await self._client.send(node, LeaveGroupRequest(self._name, member_id))
            # Put out by somebody else, or replaced by its own next life: gone in any case.
            if left.error_code != UnknownMemberIdError.errno:
                _check(left.error_code)
                log.warning("%s was put out of the group %s", client_id, self._name)
        return True


def _check(error_code: int) -> None:
    if error_code:
        error: Any = for_code(error_code)
        raise error
