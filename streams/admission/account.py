"""One tenant in one class: its buckets, how many requests it has open, and what is refused of it. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from schemas.records import ClassLimits, RateLimit
from streams.admission.refusal import Refusal
from streams.admission.token_bucket import TokenBucket

CONCURRENCY_RETRY_MS = 1_000
# Name of a bucket: (what it counts, for people; the code of a refusal by it).
_BUCKETS = {
    "requests": ("requests", "request_rate_exceeded"),
    "tokens": ("tokens", "token_rate_exceeded"),
    "input_tokens": ("input tokens", "token_rate_exceeded"),
    "output_tokens": ("output tokens", "token_rate_exceeded"),
}


def _amount(name: str, input_tokens: int, output_tokens: int) -> int:
    """What a request takes from the bucket `name`."""
    match name:
        case "requests":
            return 1
        case "input_tokens":
            return input_tokens
        case "output_tokens":
            return output_tokens
    return input_tokens + output_tokens


@dataclass(slots=True)
class Charge:
    """What one request has taken from one bucket, which may be one that is no longer in force."""

    name: str
    bucket: TokenBucket
    mark: int
    amount: int

    def correct(self, input_tokens: int, output_tokens: int, now: int) -> None:
        """Makes it what it should have been."""
        amount = _amount(self.name, input_tokens, output_tokens)
        if amount < self.amount:
            self.bucket.give_back(self.mark, self.amount - amount, now)
        elif amount > self.amount:
            self.mark = self.bucket.take(amount - self.amount, now)
        self.amount = amount


class Account:
    """`concurrent`: requests open, `reserved`: their tokens. `partition`: that of its requests, if known."""

    __slots__ = ("_buckets", "concurrent", "limits", "partition", "reserved")

    def __init__(self, limits: ClassLimits) -> None:
        self.limits = limits
        self.partition: int | None = None
        self._buckets = {name: TokenBucket(most) for name, most in _per_minute(limits)}
        self.concurrent = 0
        self.reserved = 0

    def change(self, limits: ClassLimits, now: int) -> None:
        """Puts other limits in force; what was used under the old ones stays used."""
        self.limits = limits
        old, self._buckets = self._buckets, {}
        for name, most in _per_minute(limits):
            bucket = self._buckets[name] = old.get(name) or TokenBucket(most)
            if bucket.capacity != most:
                bucket.resize(most, now)

    def refusal(self, input_tokens: int, output_tokens: int, now: int) -> Refusal | None:
        """Why a request may not be taken in now, or None."""
        if not self._buckets and self.limits.max_concurrent_requests is None:
            return None
        # A bucket that no wait can fill far enough refuses for good: a 429 would be tried again for ever.
        for name, bucket in self._buckets.items():
            amount = _amount(name, input_tokens, output_tokens)
            if amount > bucket.capacity:
                return _for_good(name, amount, bucket.capacity)
        most = self.limits.max_concurrent_requests
        if most is not None and self.concurrent >= most:
            message = f"the limit is {most} requests at once"
            return Refusal(429, "concurrency_limit_exceeded", message, CONCURRENCY_RETRY_MS)
        longest = 0
        refusal = None
        for name, bucket in self._buckets.items():
            wait = bucket.wait_ms(_amount(name, input_tokens, output_tokens), now)
            if wait > longest:
                longest = wait
                counted, code = _BUCKETS[name]
                refusal = Refusal(429, code, f"the limit is {bucket.capacity} {counted} per minute", wait)
        return refusal

    def take(self, input_tokens: int, output_tokens: int, now: int) -> list[Charge]:
        """Takes a request's share whether it is there or not."""
        charges = []
        for name, bucket in self._buckets.items():
            amount = _amount(name, input_tokens, output_tokens)
            charges.append(Charge(name, bucket, bucket.take(amount, now), amount))
        return charges

    def rate_limits(self, now: int) -> list[RateLimit]:
        """What is left of each limit a minute."""
        return [
            RateLimit(name, bucket.capacity, bucket.remaining(now), bucket.reset_ms(now))
            for name, bucket in self._buckets.items()
        ]


def _per_minute(limits: ClassLimits) -> Iterator[tuple[str, int]]:
    for name in _BUCKETS:
        most = getattr(limits, f"{name}_per_minute")
        if most is not None:
            yield name, most


def _for_good(name: str, amount: int, capacity: int) -> Refusal:
    if name == "requests":
        return Refusal(403, "class_not_allowed", "the limit of requests per minute is 0 for this class")
    counted = _BUCKETS[name][0]
    return Refusal(
        400,
        "tokens_per_minute_exceeded",
        f"the request may use {amount} {counted} (prompt and max_tokens), above the limit of "
        f"{capacity} {counted} per minute: ask for fewer",
    )
