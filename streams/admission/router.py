"""The live workers by model, and which of them takes a request: late, only one that has room now."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter

from schemas.fleet import Member
from schemas.handoff_records import WorkerRole
from schemas.prefix_sketch import is_shared
from schemas.records import InferenceRequest
from streams.admission import outlook
from streams.admission.affinity import PromptPrefix
from streams.admission.choice import DEFAULT_MAX_AFFINITY as DEFAULT_MAX_AFFINITY
from streams.admission.choice import NEAR as NEAR
from streams.admission.choice import Blocked as Blocked
from streams.admission.choice import RoutingPolicy as RoutingPolicy
from streams.admission.choice import best_of
from streams.admission.choice import is_suspect as is_suspect
from streams.admission.choice import score as score
from streams.admission.fair_queue import QueuedRequest
from streams.admission.in_flight import InFlight
from streams.admission.pairing import Pools, Route, Way, route
from streams.admission.reservations import Reservations
from streams.admission.room import Part, Room
from streams.admission.shares import Share
from streams.admission.worker import Worker, num_tokens

# A worker counts as at most so much slower than the fastest: rates are running means over unlike steps.
MAX_SLOWNESS = 4.0
_load = attrgetter("load")


@dataclass(frozen=True, slots=True)
class PoolChange:
    """Workers of a model lack a partner of `role` from now on (`is_missing`), or none does any more."""

    model: str
    role: WorkerRole
    is_missing: bool


class Router:
    """`ways` counts the requests that were dispatched in fleets with prefill and decode slots, by their way.
    `changes` are to be drained."""

    def __init__(self, policy: RoutingPolicy | None = None) -> None:
        self.policy = policy or RoutingPolicy()
        self.reservations = Reservations()
        self.ways: Counter[Way] = Counter()
        self.changes: list[PoolChange] = []
        self._workers: dict[int, Worker] = {}
        self._by_model: dict[str, list[Worker]] = {}
        self._pools: dict[str, Pools] = {}
        self._ever_missing: set[tuple[str, WorkerRole]] = set()

    def update(self, members: Iterable[Member]) -> None:
        """Takes the workers that live now; what was in flight to others is forgotten with them."""
        workers: dict[int, Worker] = {}
        for member in members:
            heartbeat = member.heartbeat
            if heartbeat is None or heartbeat.worker is None:
                continue
            worker = self._workers.get(member.slot)
            if worker is None or worker.epoch != member.epoch:
                worker = Worker(
                    member.slot, member.epoch, heartbeat, heartbeat.worker, member.draining, member.heard_at
                )
            elif worker.heartbeat is not heartbeat:
                worker.update(heartbeat, heartbeat.worker, member.heard_at)
            worker.draining = member.draining
            workers[member.slot] = worker
        self._workers = workers
        self._by_model = {}
        for worker in workers.values():
            if worker.takes_requests:
                self._by_model.setdefault(worker.status.model, []).append(worker)
        for same in self._by_model.values():
            _compare(same)
        self._part()
        if self.reservations:
            self.reservations.retain(workers)

    @property
    def num_workers(self) -> int:
        return len(self._workers)

    def workers(self, model: str) -> list[Worker]:
        """Those that take requests for the model."""
        return self._by_model.get(model, [])

    def models(self) -> list[str]:
        """Those that some worker takes requests for."""
        return list(self._by_model)

    def kv_use(self, model: str) -> float:
        """The part of the KV blocks for a model's answers that is in use or claimed; 0 without workers."""
        return outlook.kv_use(self.workers(model), self._pools.get(model))

    def tokens_per_s(self, model: str) -> float:
        """Prompt and output tokens that a model's workers get through, as far as they have measured it."""
        return outlook.tokens_per_s(self.workers(model), self._pools.get(model))

    def has_room(self, request: InferenceRequest, expected_output_tokens: int) -> bool:
        """Whether it would be dispatched at once, if it came first."""
        model = request.model
        workers, pools = self.workers(model), self._pools.get(model)
        return outlook.has_room(self.policy, workers, pools, request, expected_output_tokens)

    def prefill_ms(self, request: InferenceRequest) -> float | None:
        """From the dispatch of a request that comes now to its first token. None: not known."""
        model = request.model
        return outlook.prefill_ms(self.policy.hop, self.workers(model), self._pools.get(model), request)

    def choose(
        self,
        request: InferenceRequest,
        expected_output_tokens: int,
        prefix: PromptPrefix | None = None,
        share: Share | None = None,
    ) -> Worker | Blocked:
        """The worker with room for the request that has the best score.

        `prefix` None: the cache says nothing. `share` None: all room is this process's. Whatever its role,
        the worker is to have all of the request: see `route`.
        """
        known = prefix if self.policy.affinity else None
        workers = self._by_model.get(request.model, [])
        return best_of(self.policy, workers, request, expected_output_tokens, known, share)

    def route(
        self,
        request: InferenceRequest,
        expected_output_tokens: int,
        prefix: PromptPrefix | None = None,
        share: Share | None = None,
    ) -> Route | Blocked:
        """Which worker, or which two, take the request. As `choose` where all workers are unified."""
        if (pools := self._pools.get(request.model)) is not None:
            return route(self.policy, pools, request, expected_output_tokens, prefix, share)
        worker = self.choose(request, expected_output_tokens, prefix, share)
        return worker if isinstance(worker, Blocked) else Route(Way.UNIFIED, worker)

    def rivals(self, chosen: Route, model: str) -> list[Worker]:
        """Whom `chosen.worker` was chosen among."""
        if (pools := self._pools.get(model)) is None:
            return self.workers(model)
        for pair in pools.pairs:
            for pool in (pair.prefill, pair.decode):
                if chosen.worker in pool:
                    return pool
        return pools.whole

    def candidates(
        self, item: QueuedRequest, most: int, among: list[Worker] | None = None, part: Part = Part.WHOLE
    ) -> list[Worker]:
        """The least loaded that have room for it, `most` of them; free room, if there is any."""
        request, expected = item.request, item.expected_output_tokens
        if part is Part.PREFILL:
            expected = 1
        whole = num_tokens(request, expected)
        by_load = sorted(self.workers(request.model) if among is None else among, key=_load)
        for room in (Room.FREE, Room.TAKEN):
            fit = (
                worker
                for worker in by_load
                if (whole <= worker.free_tokens) is (room is Room.FREE)
                and worker.fits(request, part)
                and worker.room(request, expected, None, part) is room
            )
            if found := list(islice(fit, most)):
                return found
        return []

    def dispatch(
        self,
        worker: Worker,
        request: InferenceRequest,
        expected_output_tokens: int,
        prefix: PromptPrefix | None = None,
    ) -> InFlight:
        """Counts the request at the worker until a heartbeat does."""
        cached = 0
        if prefix is not None and (sketch := worker.status.prefix_sketch):
            cached = worker.cached_tokens(prefix)
            worker.sent.add(prefix.keys(is_shared(sketch)))
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        entry = InFlight(
            priority=request.priority,
            blocks=worker.blocks_for(request, expected_output_tokens),
            prefill_tokens=num_tokens - cached,
            cached_tokens=cached,
        )
        worker.add(entry)
        if is_suspect(request):
            worker.suspects.add(request.request_id)
        return entry

    def dispatch_along(
        self,
        chosen: Route,
        request: InferenceRequest,
        expected_output_tokens: int,
        prefix: PromptPrefix | None,
        expires_at: int,
    ) -> InFlight:
        """Counts the request where its route goes; at a decode slot until its KV is there, or
        `expires_at`."""
        if self._pools:
            self.ways[chosen.way] += 1
        if chosen.decode is None:
            return self.dispatch(chosen.worker, request, expected_output_tokens, prefix)
        # Blocks at decode are taken before anything is asked of prefill.
        self.reservations.take(chosen.worker, chosen.decode, request, expected_output_tokens, expires_at)
        if is_suspect(request):
            chosen.decode.suspects.add(request.request_id)
        return self.dispatch(chosen.worker, request, 1, prefix)

    def missing(self, model: str) -> frozenset[WorkerRole]:
        """Roles that workers of the model lack a partner of."""
        pools = self._pools.get(model)
        return pools.missing if pools is not None else frozenset()

    def pool_states(self) -> Iterator[tuple[str, WorkerRole, bool]]:
        """By model and role whether it is missed, of those that ever were."""
        for model, role in sorted(self._ever_missing):
            yield model, role, role in self.missing(model)

    def _part(self) -> None:
        """Parts each model's workers by role."""
        before, self._pools = self._pools, {}
        for model, same in self._by_model.items() if self.policy.hop.enabled else ():
            if (pools := Pools.of(same)) is not None:
                self._pools[model] = pools
        for model in before.keys() | self._pools.keys():
            old = before[model].missing if model in before else frozenset()
            new = self.missing(model)
            self._ever_missing |= {(model, role) for role in new}
            self.changes += [PoolChange(model, role, role in new) for role in sorted(old ^ new)]

    def billed(self, slot: int, epoch: int, request_id: bytes) -> None:
        """A usage row: the request does no harm to that run any more."""
        worker = self._workers.get(slot)
        if worker is not None and worker.epoch == epoch:
            worker.suspects.discard(request_id)
        if self.reservations:
            self.reservations.release(request_id)

    def ended(self, slot: int, epoch: int, priority: int, tokens: int) -> None:
        """A request of `tokens` (prompt and output) that this router dispatched has ended at that run."""
        worker = self._workers.get(slot)
        if worker is not None and worker.epoch == epoch:
            worker.ended(priority, tokens)


def _compare(workers: list[Worker]) -> None:
    """Sets how slow each is beside the fastest of the model, by its own figures; one that has none is fast.

    A step that lasts longer than its worker's mean counts as long as it has lasted.
    """
    rates = [worker.status.prefill_tokens_per_s for worker in workers]
    steps = [max(worker.status.step_time_ms, float(worker.status.step_age_ms)) for worker in workers]
    best_rate, best_step = max(rates), min((step for step in steps if step > 0), default=0.0)
    for worker, rate, step in zip(workers, rates, steps, strict=True):
        prefill_slowness = _slowness(best_rate / rate) if rate > 0 else 1.0
        step_slowness = _slowness(step / best_step) if step > 0 else 1.0
        worker.compared(prefill_slowness, step_slowness)


def _slowness(ratio: float) -> float:
    """In quarters: less than that is noise, and would send all that comes to the same one of equals."""
    return min(MAX_SLOWNESS, round(4 * ratio) / 4)
