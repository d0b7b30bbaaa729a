"""Creates topics, and holds those that exist to the layout they should have."""

import asyncio
from collections.abc import Sequence

from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from schemas.kafka_login import client_settings
from schemas.topics import Layout, TopicSpec, tenant_topic_specs

_NO_ERROR = 0
_TOPIC_ALREADY_EXISTS = 36
_POLL_S = 0.02


class TopicError(RuntimeError):
    """Topics are not as they should be. The message has a line for each."""


async def create_tenant_topics(
    bootstrap_servers: str, tenant: str, layout: Layout, timeout: float = 30.0
) -> list[str]:
    """`create` for the batch topics of a tenant. Raises ValueError for a name that is none."""
    return await create(bootstrap_servers, tenant_topic_specs(tenant, layout), layout.replication, timeout)


async def create(
    bootstrap_servers: str, specs: Sequence[TopicSpec], replication: int, timeout: float = 30.0
) -> list[str]:
    """Creates the topics of `specs` that are missing; returns their names when all can be written to.

    Raises TopicError, TimeoutError after `timeout` seconds.
    """
    admin = AIOKafkaAdminClient(**client_settings(bootstrap_servers), request_timeout_ms=int(timeout * 1000))
    async with asyncio.timeout(timeout):
        try:
            await admin.start()
            # 1. A broker that has just started, or was fenced on a loaded machine, names no controller yet.
            while not (await admin.describe_cluster())["brokers"]:  # noqa: ASYNC110  # nobody would set an event
                await asyncio.sleep(_POLL_S)
            # 2. Ask for all. The answer has an error code per topic; the call never fails for one.
            new = [
                NewTopic(
                    name=spec.name,
                    num_partitions=spec.partitions,
                    replication_factor=replication,
                    topic_configs=spec.config,
                )
                for spec in specs
            ]
            response = await admin.create_topics(new, timeout_ms=int(timeout * 1000))
            answers = {entry[0]: (entry[1], entry[2]) for entry in response.topic_errors}
            refused = [
                f"{name}: the broker answered error {code} {message or ''}".rstrip()
                for name, (code, message) in answers.items()
                if code not in (_NO_ERROR, _TOPIC_ALREADY_EXISTS)
            ]
            if refused:
                raise TopicError("topics could not be created:\n  " + "\n  ".join(refused))
            # 3. Hold what was there before, and what is new, to the partition counts the layout needs.
            await _check_partitions(admin, specs)
        finally:
            await admin.close()
    return [name for name, (code, _) in answers.items() if code == _NO_ERROR]


async def _check_partitions(admin: AIOKafkaAdminClient, specs: Sequence[TopicSpec]) -> None:
    while True:
        found = {
            topic["topic"]: [partition["leader"] for partition in topic["partitions"]]
            for topic in await admin.describe_topics([spec.name for spec in specs])
        }
        # Metadata lag behind the creation: a topic with no leader yet cannot be written to.
        if all(found.get(spec.name) and min(found[spec.name]) >= 0 for spec in specs):
            break
        await asyncio.sleep(_POLL_S)
    wrong = [
        f"{spec.name}: has {len(found[spec.name])} partitions, the layout needs {spec.partitions}"
        for spec in specs
        if len(found[spec.name]) != spec.partitions
    ]
    if wrong:
        raise TopicError(
            "existing topics do not fit the layout, which is fixed when topics are created. "
            "Use the old numbers of shards and slots, or begin anew with fresh data:\n  " + "\n  ".join(wrong)
        )
