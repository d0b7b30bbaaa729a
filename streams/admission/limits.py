"""What a tenant may use: tokens and requests a minute, and requests at once, per class.

A request reserves prompt + max_tokens when it is taken in. Its usage row settles it, `end_ms` expires it.
All by request_id and idempotent, in any order: rows come twice, and after a restart they come for
reservations that another process made.
"""

import heapq
from collections import deque
from dataclasses import dataclass

from schemas.records import ClassLimits, Tenant
from streams.admission.refusal import Refusal
from streams.admission.token_bucket import TokenBucket

# A settled request is remembered so long that a second row of it is not charged again.
REMEMBER_SETTLED_MS = 60_000
CONCURRENCY_RETRY_MS = 1_000


@dataclass(slots=True)
class _Reservation:
    tenant: str
    priority: int
    tokens: int  # what is charged to the bucket now
    bucket: TokenBucket | None  # the one charged, though the limit may have changed since
    mark: int
    end_at: int
    open: bool


class _Account:
    """One tenant in one class."""

    __slots__ = ("concurrent", "limits", "requests", "reserved", "tokens")

    def __init__(self, limits: ClassLimits) -> None:
        self.limits = limits
        self.tokens = None if limits.tokens_per_minute is None else TokenBucket(limits.tokens_per_minute)
        self.requests = (
            None if limits.requests_per_minute is None else TokenBucket(limits.requests_per_minute)
        )
        self.concurrent = 0
        self.reserved = 0

    def change(self, limits: ClassLimits, now: int) -> None:
        self.limits = limits
        self.tokens = _resized(self.tokens, limits.tokens_per_minute, now)
        self.requests = _resized(self.requests, limits.requests_per_minute, now)

    def refusal(self, tokens: int, now: int) -> Refusal | None:
        limits = self.limits
        # A bucket that no wait can fill far enough refuses for good: a 429 would be tried again for ever.
        if self.tokens is not None and tokens > self.tokens.capacity:
            return Refusal(
                400,
                "tokens_per_minute_exceeded",
                f"the request may use {tokens} tokens (prompt and max_tokens), above the limit of "
                f"{self.tokens.capacity} tokens per minute: ask for fewer",
            )
        if self.requests is not None and self.requests.capacity < 1:
            return Refusal(403, "class_not_allowed", "the limit of requests per minute is 0 for this class")
        most = limits.max_concurrent_requests
        if most is not None and self.concurrent >= most:
            return Refusal(
                429,
                "concurrency_limit_exceeded",
                f"the limit is {most} requests at once",
                CONCURRENCY_RETRY_MS,
            )
        if self.requests is not None and (wait := self.requests.wait_ms(1, now)):
            return Refusal(
                429,
                "request_rate_exceeded",
                f"the limit is {self.requests.capacity} requests per minute",
                wait,
            )
        if self.tokens is not None and (wait := self.tokens.wait_ms(tokens, now)):
            return Refusal(
                429, "token_rate_exceeded", f"the limit is {self.tokens.capacity} tokens per minute", wait
            )
        return None


def _resized(bucket: TokenBucket | None, capacity: int | None, now: int) -> TokenBucket | None:
    if capacity is None:
        return None
    if bucket is None:
        return TokenBucket(capacity)
    if bucket.capacity != capacity:
        bucket.resize(capacity, now)
    return bucket


class Limits:
    """Reservations of all tenants. Times are ms of the epoch, `now` never needs to be exact."""

    def __init__(self) -> None:
        self._limits: dict[str, dict[int, ClassLimits]] = {}
        self._accounts: dict[tuple[str, int], _Account] = {}
        self._reservations: dict[bytes, _Reservation] = {}
        self._settled: deque[tuple[int, bytes]] = deque()
        self._ends: list[tuple[int, bytes]] = []
        self._num_open = 0

    def set_tenant(self, tenant: Tenant, now: int) -> None:
        """Puts the tenant's limits in force; a class without an entry is unlimited."""
        self._limits[tenant.name] = limits = {entry.priority: entry for entry in tenant.limits}
        for (name, priority), account in self._accounts.items():
            if name == tenant.name:
                account.change(limits.get(priority) or ClassLimits(priority), now)

    def remove_tenant(self, name: str) -> None:
        """Forgets the limits of a tenant; what it has reserved still settles or expires."""
        self._limits.pop(name, None)

    def reserve(
        self, request_id: bytes, attempt: int, tenant: str, priority: int, tokens: int, end_at: int, now: int
    ) -> Refusal | None:
        """Reserves `tokens` until settled or `end_at`. A retry reserves nothing new: it is paid for."""
        known = self._reservations.get(request_id)
        if known is not None:
            if not known.open and attempt > 1:
                self._reopen(request_id, known, end_at)
            return None
        if attempt > 1:
            return None  # another process's reservation; its usage row will be charged here
        account = self._account(tenant, priority)
        if refusal := account.refusal(tokens, now):
            return refusal
        if account.requests is not None:
            account.requests.take(1, now)
        bucket = account.tokens
        mark = 0 if bucket is None else bucket.take(tokens, now)
        reservation = _Reservation(tenant, priority, tokens, bucket, mark, end_at, open=True)
        self._reservations[request_id] = reservation
        self._opened(account, reservation, request_id)
        return None

    def settle(
        self, request_id: bytes, tenant: str, priority: int, used: int, ended_at: int, now: int
    ) -> None:
        """Charges `used` in place of what was reserved. Of several rows the one with most tokens counts."""
        known = self._reservations.get(request_id)
        if known is None:
            bucket = self._account(tenant, priority).tokens
            mark = 0 if bucket is None else bucket.take(used, min(ended_at, now))
            known = _Reservation(tenant, priority, used, bucket, mark, now, open=False)
            self._reservations[request_id] = known
            self._settled.append((now + REMEMBER_SETTLED_MS, request_id))
            return
        if known.open:
            self._close(known)
            self._charge(known, used, now)
            self._settled.append((now + REMEMBER_SETTLED_MS, request_id))
        elif used > known.tokens:
            self._charge(known, used, now)

    def release(self, request_id: bytes, now: int) -> None:
        """Gives all of an open reservation back and forgets it: the request never ran."""
        known = self._reservations.get(request_id)
        if known is not None and known.open:
            self._close(known)
            self._charge(known, 0, now)
            del self._reservations[request_id]

    def expire(self, now: int) -> None:
        """Closes what is past its end (it stays charged in full) and forgets what was settled long ago."""
        while self._ends and self._ends[0][0] <= now:
            end_at, request_id = heapq.heappop(self._ends)
            known = self._reservations.get(request_id)
            if known is not None and known.open and known.end_at == end_at:
                self._close(known)
                self._settled.append((now + REMEMBER_SETTLED_MS, request_id))
        while self._settled and self._settled[0][0] <= now:
            _, request_id = self._settled.popleft()
            known = self._reservations.get(request_id)
            if known is not None and not known.open:
                del self._reservations[request_id]
        if len(self._ends) > 2 * self._num_open + 1024:
            # Most of a day's ends belong to requests that ended long before: drop them.
            self._ends = [(r.end_at, key) for key, r in self._reservations.items() if r.open]
            heapq.heapify(self._ends)

    def reserved_tokens(self, tenant: str, priority: int) -> int:
        """Tokens in open reservations."""
        account = self._accounts.get((tenant, priority))
        return 0 if account is None else account.reserved

    def num_concurrent(self, tenant: str, priority: int) -> int:
        """Requests taken in and not ended."""
        account = self._accounts.get((tenant, priority))
        return 0 if account is None else account.concurrent

    def num_remembered(self) -> int:
        """Reservations held in memory, settled ones included."""
        return len(self._reservations)

    def _account(self, tenant: str, priority: int) -> _Account:
        account = self._accounts.get((tenant, priority))
        if account is None:
            limits = self._limits.get(tenant, {}).get(priority) or ClassLimits(priority)
            account = self._accounts[(tenant, priority)] = _Account(limits)
        return account

    def _opened(self, account: _Account, reservation: _Reservation, request_id: bytes) -> None:
        reservation.open = True
        account.concurrent += 1
        account.reserved += reservation.tokens
        self._num_open += 1
        heapq.heappush(self._ends, (reservation.end_at, request_id))

    def _reopen(self, request_id: bytes, reservation: _Reservation, end_at: int) -> None:
        reservation.end_at = end_at
        self._opened(self._account(reservation.tenant, reservation.priority), reservation, request_id)

    def _close(self, reservation: _Reservation) -> None:
        account = self._account(reservation.tenant, reservation.priority)
        account.concurrent -= 1
        account.reserved -= reservation.tokens
        self._num_open -= 1
        reservation.open = False

    @staticmethod
    def _charge(reservation: _Reservation, tokens: int, now: int) -> None:
        bucket = reservation.bucket
        if bucket is not None:
            if tokens < reservation.tokens:
                bucket.give_back(reservation.mark, reservation.tokens - tokens, now)
            elif tokens > reservation.tokens:
                reservation.mark = bucket.take(tokens - reservation.tokens, now)
        reservation.tokens = tokens
