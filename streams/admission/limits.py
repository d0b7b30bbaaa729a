"""What a tenant may use: tokens and requests a minute, and requests at once, per class.

A request reserves prompt + max_tokens when it is taken in. Its usage row settles it, `end_ms` expires it.
All by request_id and idempotent, in any order: rows come twice, and after a takeover they come for
reservations that another process made, which the owners restate (restating.py).
"""

import heapq
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from schemas.records import ClassLimits, RateLimit, RestatedRequest, Tenant
from schemas.topics import NUM_CLASSES
from streams.admission.account import Account, Charge
from streams.admission.refusal import Refusal

# A settled request is remembered so long that a second row of it is not charged again.
REMEMBER_SETTLED_MS = 60_000


class OpenReservation(NamedTuple):
    """`tokens` are held until a usage row settles them, or `end_at` (ms of the epoch) is past."""

    request_id: bytes
    tenant: str
    priority: int
    tokens: int
    end_at: int


@dataclass(slots=True)
class _Reservation:
    tenant: str
    priority: int
    tokens: int  # reserved while it is open, used when it is settled
    charges: list[Charge]
    end_at: int
    open: bool


class Limits:
    """Reservations of all tenants. Times are ms of the epoch, `now` never needs to be exact.

    `partition` is that of inference.requests where all requests of a tenant in a class lie.
    """

    def __init__(self) -> None:
        self._limits: dict[str, dict[int, ClassLimits]] = {}
        self._accounts: dict[tuple[str, int], Account] = {}
        self._reservations: dict[bytes, _Reservation] = {}
        self._settled: deque[tuple[int, bytes]] = deque()
        self._ends: list[tuple[int, bytes]] = []
        self._num_open = 0

    def set_tenant(self, tenant: Tenant, now: int) -> None:
        """Puts the tenant's limits in force; a class without an entry is unlimited."""
        self._limits[tenant.name] = limits = {entry.priority: entry for entry in tenant.limits}
        for priority in range(NUM_CLASSES):
            account = self._accounts.get((tenant.name, priority))
            if account is not None:
                account.change(limits.get(priority) or ClassLimits(priority), now)

    def remove_tenant(self, name: str) -> None:
        """Forgets the limits of a tenant; what it has reserved still settles or expires."""
        self._limits.pop(name, None)

    def reserve(
        self,
        request_id: bytes,
        attempt: int,
        tenant: str,
        priority: int,
        input_tokens: int,
        output_tokens: int,
        end_at: int,
        now: int,
        *,
        partition: int | None = None,
    ) -> Refusal | None:
        """Reserves until settled or `end_at`. A retry reserves nothing new: it is paid for."""
        known = self._reservations.get(request_id)
        if known is not None:
            if not known.open and attempt > 1:
                known.end_at = end_at
                self._opened(request_id, known)
            return None
        if attempt > 1:
            return None  # another process's reservation, not restated; its usage row will be charged here
        account = self._account(tenant, priority, partition)
        refusal = account.refusal(input_tokens, output_tokens, now)
        if refusal is None:
            charges = account.take(input_tokens, output_tokens, now)
            self._open(request_id, tenant, priority, input_tokens + output_tokens, charges, end_at)
        return refusal

    def restate(self, request: RestatedRequest, now: int, *, partition: int | None = None) -> None:
        """Takes over what another process let in: it counts as if it had been here.

        One that is known stays as it is.
        """
        request_id, end_at = request.request_id, now - request.age_ms + request.end_ms
        if request_id in self._reservations or end_at <= now:
            return
        tenant, priority = request.tenant, request.priority
        account = self._account(tenant, priority, partition)
        charges = account.take(request.input_tokens, request.output_tokens, now - request.age_ms)
        tokens = request.input_tokens + request.output_tokens
        self._open(request_id, tenant, priority, tokens, charges, end_at)

    def settle(
        self,
        request_id: bytes,
        tenant: str,
        priority: int,
        input_tokens: int,
        output_tokens: int,
        used_at: int,
        now: int,
        *,
        partition: int | None = None,
    ) -> None:
        """Charges what was used in place of what was reserved. Of several rows that with most tokens counts.

        `used_at`: when, for a request that is not known here.
        """
        used = input_tokens + output_tokens
        known = self._reservations.get(request_id)
        if known is None:
            account = self._account(tenant, priority, partition)
            charges = account.take(input_tokens, output_tokens, min(used_at, now))
            self._reservations[request_id] = _Reservation(tenant, priority, used, charges, now, open=False)
        elif known.open:
            self._close(known)
            self._correct(known, input_tokens, output_tokens, now)
        else:
            if used > known.tokens:
                self._correct(known, input_tokens, output_tokens, now)
            return
        self._settled.append((now + REMEMBER_SETTLED_MS, request_id))

    def release(self, request_id: bytes, now: int) -> None:
        """Gives all tokens of an open reservation back and forgets it: the request never ran. It was one."""
        known = self._reservations.get(request_id)
        if known is not None and known.open:
            self._close(known)
            self._correct(known, 0, 0, now)
            del self._reservations[request_id]

    def drop(self, partitions: Collection[int]) -> None:
        """Forgets what was reserved and used of partitions that another process has now: it knows."""
        gone = {key for key, account in self._accounts.items() if account.partition in partitions}
        if not gone:
            return
        for key in gone:
            self._num_open -= self._accounts.pop(key).concurrent
        self._reservations = {
            request_id: known
            for request_id, known in self._reservations.items()
            if (known.tenant, known.priority) not in gone
        }

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

    def rate_limits(self, tenant: str, priority: int, now: int) -> list[RateLimit]:
        """What is left of the tenant's limits a minute in a class; none where it has none."""
        account = self._accounts.get((tenant, priority))
        return [] if account is None else account.rate_limits(now)

    def reserved_tokens(self, tenant: str, priority: int) -> int:
        """Tokens in open reservations."""
        account = self._accounts.get((tenant, priority))
        return 0 if account is None else account.reserved

    def open_reservations(self) -> Iterator[OpenReservation]:
        """All that are open now; what is opened while they are taken is left out."""
        for request_id in list(self._reservations):
            known = self._reservations.get(request_id)
            if known is not None and known.open:
                yield OpenReservation(request_id, known.tenant, known.priority, known.tokens, known.end_at)

    def num_concurrent(self, tenant: str, priority: int) -> int:
        """Requests taken in and not ended."""
        account = self._accounts.get((tenant, priority))
        return 0 if account is None else account.concurrent

    def num_remembered(self) -> int:
        """Reservations held in memory, settled ones included."""
        return len(self._reservations)

    def _account(self, tenant: str, priority: int, partition: int | None = None) -> Account:
        account = self._accounts.get((tenant, priority))
        if account is None:
            limits = self._limits.get(tenant, {}).get(priority) or ClassLimits(priority)
            account = self._accounts[(tenant, priority)] = Account(limits)
        if partition is not None:
            account.partition = partition
        return account

    def _open(
        self, request_id: bytes, tenant: str, priority: int, tokens: int, charges: list[Charge], end_at: int
    ) -> None:
        reservation = _Reservation(tenant, priority, tokens, charges, end_at, open=True)
        self._reservations[request_id] = reservation
        self._opened(request_id, reservation)

    def _opened(self, request_id: bytes, reservation: _Reservation) -> None:
        account = self._account(reservation.tenant, reservation.priority)
        reservation.open = True
        account.concurrent += 1
        account.reserved += reservation.tokens
        self._num_open += 1
        heapq.heappush(self._ends, (reservation.end_at, request_id))

    def _close(self, reservation: _Reservation) -> None:
        account = self._account(reservation.tenant, reservation.priority)
        account.concurrent -= 1
        account.reserved -= reservation.tokens
        self._num_open -= 1
        reservation.open = False

    @staticmethod
    def _correct(reservation: _Reservation, input_tokens: int, output_tokens: int, now: int) -> None:
        for charge in reservation.charges:
            charge.correct(input_tokens, output_tokens, now)
        reservation.tokens = input_tokens + output_tokens
