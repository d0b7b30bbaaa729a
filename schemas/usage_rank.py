"""Which of a request's usage rows counts (architecture §8). Pure."""

from schemas.records import Usage


def usage_rank(usage: Usage) -> tuple[int, bool, bool, int]:
    """Of the rows of one request the highest counts: by attempt, sealed, free, output tokens.

    Free is a sealed row without any token. Its owner says by it that the request costs nothing, and may have
    sealed before what it had cost: a client can be refused once it is billed.
    """
    free = usage.sealed and not (usage.input_tokens or usage.output_tokens)
    return usage.attempt, usage.sealed, free, usage.output_tokens
