"""What a tenant has left of its limits, in the headers of OpenAI's API or of Anthropic's. Pure.

Admission says it with its answer to the request.
"""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from schemas.records import RateLimit

_OF_TOKENS = ("tokens", "input_tokens", "output_tokens")
_OPENAI_LIMITS = ("requests", "tokens")
_ANTHROPIC_LIMITS = ("requests", *_OF_TOKENS)
_TELLS = {
    "limit": "Most of them a minute.",
    "remaining": "Of these, what may be asked for now.",
    "reset": "When all of it may be again, if nothing is asked for meanwhile.",
}
# What `duration` writes.
_DURATION = "^([0-9]+h)?([0-9]+m)?[0-9.]+m?s$"


def rate_headers(told: Iterable[RateLimit], *, anthropic: bool, now_s: float) -> list[tuple[bytes, bytes]]:
    """Of the limits that the tenant has; `now_s`: s of the epoch.

    Where one is told several times, as for each choice, that with the least left counts. `tokens` is the most
    restrictive limit of tokens, as Anthropic defines it; OpenAI knows no other.
    """
    least: dict[str, RateLimit] = {}
    for limit in told:
        known = least.get(limit.name)
        if known is None or limit.remaining < known.remaining:
            least[limit.name] = limit
    tokens = [least[name] for name in _OF_TOKENS if name in least]
    if tokens:
        least["tokens"] = min(tokens, key=lambda limit: limit.remaining)
    if not anthropic:
        names = [name for name in _OPENAI_LIMITS if name in least]
        return [header for name in names for header in _openai(name, least[name])]
    return [header for name, limit in least.items() for header in _anthropic(name, limit, now_s)]


def rate_header_objects(*, anthropic: bool) -> dict[str, dict[str, Any]]:
    """All that `rate_headers` may make, by name, as OpenAPI describes them."""
    count = {"type": "integer", "minimum": 0}
    reset = (
        {"type": "string", "format": "date-time"} if anthropic else {"type": "string", "pattern": _DURATION}
    )
    schemas = {"limit": count, "remaining": count, "reset": reset}
    limits, name_of = (_ANTHROPIC_LIMITS, _anthropic_name) if anthropic else (_OPENAI_LIMITS, _openai_name)
    return {
        name_of(limit, what): {"description": tells, "schema": schemas[what]}
        for limit in limits
        for what, tells in _TELLS.items()
    }


def _openai_name(limit: str, what: str) -> str:
    return f"x-ratelimit-{what}-{limit}"


def _anthropic_name(limit: str, what: str) -> str:
    return f"anthropic-ratelimit-{limit.replace('_', '-')}-{what}"


def _openai(name: str, limit: RateLimit) -> list[tuple[bytes, bytes]]:
    values = {"limit": limit.limit, "remaining": limit.remaining, "reset": duration(limit.reset_ms)}
    return [(_openai_name(name, what).encode(), str(value).encode()) for what, value in values.items()]


def _anthropic(name: str, limit: RateLimit, now_s: float) -> list[tuple[bytes, bytes]]:
    full_at = datetime.fromtimestamp(-(-(now_s * 1000 + limit.reset_ms) // 1000), UTC)
    values = {
        "limit": limit.limit,
        "remaining": limit.remaining,
        "reset": full_at.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    return [(_anthropic_name(name, what).encode(), str(value).encode()) for what, value in values.items()]


def duration(ms: int) -> str:
    """As OpenAI's API writes it: 120ms, 8.64s, 6m0s."""
    if 0 < ms < 1_000:
        return f"{ms}ms"
    minutes, rest = divmod(ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    text = f"{rest / 1000:g}s"
    if hours or minutes:
        text = f"{minutes}m{text}"
    return f"{hours}h{text}" if hours else text
