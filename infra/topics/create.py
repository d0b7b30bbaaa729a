"""Creates the topics of a deployment."""

from gateway.topic_admin import TopicError as TopicError
from gateway.topic_admin import create as create
from gateway.topic_admin import create_tenant_topics as create_tenant_topics
from schemas.topics import Layout, topic_specs


async def create_topics(bootstrap_servers: str, layout: Layout, timeout: float = 30.0) -> list[str]:
    """Creates the deployment's topics that are missing; returns their names.

    Raises TopicError when the broker refuses one, or one exists with another number of partitions.
    """
    return await create(bootstrap_servers, topic_specs(layout), layout.replication, timeout)
