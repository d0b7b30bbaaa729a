"""Questions to the log, whose silence is a refusal."""

from collections.abc import Awaitable
from typing import TypeVar

from aiokafka.errors import KafkaError

from gateway.errors import broker_unavailable

T = TypeVar("T")


async def asked(question: Awaitable[T]) -> T:
    """What the log says. Raises ApiError 503 when it does not."""
    try:
        return await question
    except (TimeoutError, KafkaError):
        raise broker_unavailable() from None
