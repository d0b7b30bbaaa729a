"""All that waits, over all models: whose turn it is, and who has waited too long."""

import heapq
from collections.abc import Iterator, Set

from schemas.records import InferenceRequest, QueuedTokens
from schemas.topics import priority_of
from streams.admission.fair_queue import QueuedRequest
from streams.admission.model_queue import ModelQueue
from streams.admission.pairing import Route
from streams.admission.router import Blocked, Router
from streams.admission.shares import PeerDemand, Share
from streams.admission.shedding import ShedLevel, paused

# How far past retries that no worker may take (excluded slots) a queue is searched.
MAX_SKIPPED_RETRIES = 8
# With more of the KV blocks in use, what is left is for the higher class.
MAX_FLOOR_KV_USE = 0.85
_NOTHING = ModelQueue()


class Backlog:
    """Queues by model, made as requests name them and dropped when nobody serves or wants the model."""

    def __init__(self, router: Router, peers: PeerDemand) -> None:
        self._router = router
        self._peers = peers
        self._queues: dict[str, ModelQueue] = {}
        self._deadlines: list[tuple[int, int, QueuedRequest]] = []
        self._count = 0

    def append(self, item: QueuedRequest, weight: float) -> ModelQueue:
        """Lets it wait; returns the queue it waits in."""
        queue = self._queues.get(item.request.model)
        if queue is None:
            queue = self._queues[item.request.model] = ModelQueue()
        queue.append(item, weight)
        return queue

    def cancel(self, item: QueuedRequest) -> None:
        """Takes out what waits. Raises KeyError or ValueError if it does not."""
        self._queues[item.request.model].cancel(item)

    def models(self) -> list[str]:
        """Those that something waits for."""
        return [model for model, queue in self._queues.items() if queue.waiting]

    def tenant_tokens(self, tenant: str, priority: int) -> int:
        """What waits of a tenant in a class, over all models."""
        return sum(queue.classes[priority].tenant_tokens(tenant) for queue in self._queues.values())

    # NOTE: nothing of a lower class goes to a worker while a higher one of the model waits for room, here or
    # at another process, but for the floor, which ends with the room; batch never goes before interactive.
    def take(
        self, model: str, level: ShedLevel = ShedLevel.NONE
    ) -> Iterator[tuple[QueuedRequest, Route | None]]:
        """What can be decided now: takes out what a worker has room for, in order.

        The caller counts each where it goes before it asks for the next. With None for a route the request
        stays, as none of those that serve the model could ever run it, and the caller cancels it.
        """
        queue = self._queues.get(model)
        if queue is None or not queue.waiting:
            return
        for priority, fair in enumerate(queue.classes):
            skipped = 0
            while fair.num_requests and (item := fair.first(skipped)) is not None:
                if paused(level, item.request):
                    return
                share = self._peers.share(model, priority, fair.num_tokens)
                if (owed := self._floor(queue, priority, model, level, share)) is not None:
                    queue.take(owed[0])
                    yield owed
                    continue
                route = self._router.route(item.request, item.expected_output_tokens, item.prefix, share)
                if not isinstance(route, Blocked):
                    queue.take(item)
                    yield item, route
                elif route is Blocked.NO_ROOM or not self._router.workers(model):
                    return
                elif item.request.attempt == 1:
                    yield item, None
                elif skipped == MAX_SKIPPED_RETRIES:
                    return
                else:
                    skipped += 1

    def _floor(
        self, queue: ModelQueue, priority: int, model: str, level: ShedLevel, share: Share | None
    ) -> tuple[QueuedRequest, Route] | None:
        """What the class below is owed now and has room, out of the `share` of this one, and where it
        goes."""
        item = queue.owed(priority)
        if item is None or level >= ShedLevel.CAP_FREE or paused(level, item.request):
            return None
        if self._router.kv_use(model) > MAX_FLOOR_KV_USE:
            return None
        route = self._router.route(item.request, item.expected_output_tokens, item.prefix, share)
        return None if isinstance(route, Blocked) else (item, route)

    def share(self, request: InferenceRequest) -> Share | None:
        """Of the room for the request's class, if the request is all that waits here. None: all of it."""
        tokens = len(request.prompt_token_ids)
        return self._peers.share(request.model, request.priority, tokens)

    def watch(self, item: QueuedRequest) -> None:
        """Has `expired` give it when its end comes."""
        self._count += 1
        heapq.heappush(self._deadlines, (item.end_at, self._count, item))
        if len(self._deadlines) > 2 * sum(len(queue.waiting) for queue in self._queues.values()) + 1024:
            self._deadlines = [entry for entry in self._deadlines if entry[2].waits]
            heapq.heapify(self._deadlines)

    def expired(self, now: int) -> Iterator[QueuedRequest]:
        """What has reached its end and still waits. The caller cancels each."""
        while self._deadlines and self._deadlines[0][0] <= now:
            item = heapq.heappop(self._deadlines)[2]
            if item.waits:
                yield item

    def without_worker(self, now: int, wait_ms: int) -> list[QueuedRequest]:
        """What has waited for `wait_ms` while no worker served its model. Call it often."""
        found: list[QueuedRequest] = []
        for model, queue in list(self._queues.items()):
            if self._router.workers(model):
                queue.no_worker_since = None
            elif queue.waiting:
                if queue.no_worker_since is None:
                    queue.no_worker_since = now
                found += queue.overdue(now, wait_ms)
            else:
                # Model names come from requests: those that nobody serves must not pile up.
                del self._queues[model]
        return found

    def of_partitions(self, partitions: Set[int]) -> list[QueuedRequest]:
        """What came from these partitions of inference.requests."""
        return [
            item
            for queue in self._queues.values()
            for item in queue.waiting.values()
            if item.partition in partitions
        ]

    def queued_tokens(self, partition: int) -> list[QueuedTokens]:
        """Tokens that wait from a partition of inference.requests, by model."""
        priority = priority_of(partition)
        return [
            QueuedTokens(model, priority, tokens)
            for model, queue in self._queues.items()
            if (tokens := queue.tokens_of(partition))
        ]

    def queue(self, model: str) -> ModelQueue:
        """What waits for a model, for its figures alone."""
        return self._queues.get(model) or _NOTHING

    def num_requests(self, priority: int) -> int:
        """Requests that wait in a class."""
        return sum(queue.classes[priority].num_requests for queue in self._queues.values())
