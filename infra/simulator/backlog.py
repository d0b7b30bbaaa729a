"""A batch's coordinator: keeps a window of its requests open, and sends again what was refused."""

from collections import deque
from collections.abc import Callable
from random import Random

from infra.simulator.scenario import BatchBacklog
from infra.simulator.workload import Arrival, length_sampler
from schemas.priority import PriorityClass

_DAY_MS = 86_400_000


class BacklogCoordinator:
    """`send(arrival)` sends one request off."""

    def __init__(self, name: str, backlog: BatchBacklog, seed: int, send: Callable[[Arrival], None]) -> None:
        random = Random(f"{seed} {name}")
        self._name, self._backlog, self._send = name, backlog, send
        self._prompt = length_sampler(backlog.prompt, random)
        self._output = length_sampler(backlog.output, random)
        self._num_left = backlog.requests
        self._num_open = 0
        self._again: deque[Arrival] = deque()

    def fill(self, now: float) -> None:
        """Sends as many as the window has room for."""
        while self._num_open < self._backlog.window:
            if self._again:
                arrival = self._again.popleft()
                arrival.at = now
            elif self._num_left:
                self._num_left -= 1
                num_output_tokens = self._output()
                arrival = Arrival(
                    now,
                    self._name,
                    self._backlog.tenant,
                    self._backlog.model,
                    PriorityClass.BATCH,
                    self._prompt(),
                    num_output_tokens,
                    num_output_tokens,
                    end_ms=_DAY_MS,
                )
            else:
                return
            self._num_open += 1
            self._send(arrival)

    def ended(self, now: float) -> None:
        """One of its requests has come to an end."""
        self._num_open -= 1
        self.fill(now)

    def refused(self, arrival: Arrival) -> None:
        """Its request is to be sent again. The caller calls `fill` when it may be."""
        self._num_open -= 1
        self._again.append(arrival)
