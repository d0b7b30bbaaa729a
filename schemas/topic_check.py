"""Whether the topics that a process needs are there, looked at when it starts.

A client that asks for one that is not there waits, without a word.
"""

import asyncio
from collections.abc import Iterable
from typing import Protocol

# Who makes the topics may be at it now.
_PATIENCE_S = 5.0
_POLL_S = 0.2


class Client(Protocol):
    async def topics(self) -> set[str]: ...


class MissingTopicsError(RuntimeError):
    """The message names them, and says how to make them."""


async def check_topics(client: Client, needed: Iterable[str]) -> None:
    """`client`: a consumer of aiokafka that was started. The caller sets a deadline for brokers that do not
    answer. Raises MissingTopicsError some seconds later, and what the client raises."""
    deadline = asyncio.get_running_loop().time() + _PATIENCE_S
    while missing := sorted(set(needed) - await client.topics()):
        if asyncio.get_running_loop().time() >= deadline:
            raise MissingTopicsError(
                f"topics that this release needs are not there: {', '.join(missing)}. Make them with "
                "`headrace topics`, which leaves those there are as they are, and start again"
            )
        await asyncio.sleep(_POLL_S)
