"""The flights of a simulated worker: how far each has come, and the times between its tokens."""

from collections.abc import Iterable
from dataclasses import dataclass

from infra.simulator.decode_group import DecodeGroup
from infra.simulator.measures import Flight, Measures
from schemas.priority import PriorityClass
from workers.batch import RunnerOutput, ScheduledSequence
from workers.request import FinishReason, Request, RequestOutput

TOKEN_ID, EOS_TOKEN_ID = 2, 1


@dataclass(frozen=True, slots=True)
class Ended:
    """A request ended here: `flight` had `num_cached_tokens` of its prompt found."""

    flight: Flight
    request: Request
    reason: FinishReason
    error: str


class WorkerFlights:
    """By request, from its dispatch to its end here. Times are in seconds."""

    def __init__(self, measures: Measures, model: str) -> None:
        self._gaps = measures.gaps_of(model)
        self._token_log = measures.token_log
        self._flights: dict[bytes, Flight] = {}
        self._num_output_tokens: dict[bytes, int] = {}

    def add(self, request_id: bytes, flight: Flight) -> None:
        self._flights[request_id] = flight

    def expect(self, request: Request, max_tokens: int) -> None:
        """It ends with as many tokens as it arrived to get, at most `max_tokens`."""
        request_id = request.request_id
        arrival = self._flights[request_id].arrival
        self._num_output_tokens[request_id] = min(arrival.num_output_tokens, max_tokens)

    def is_expected(self, request: Request) -> bool:
        """Whether the engine has it, maybe as an earlier attempt."""
        return request.request_id in self._num_output_tokens

    def num_left(self, request: Request) -> int:
        """Tokens that are to come of the request."""
        return self._num_output_tokens[request.request_id] - len(request.output_token_ids)

    def sample(self, sequences: list[ScheduledSequence]) -> RunnerOutput:
        """The tokens of a step: the last one of a request is an end token."""
        tokens: list[int | None] = []
        for sequence in sequences:
            if not sequence.samples:
                tokens.append(None)
            else:
                tokens.append(EOS_TOKEN_ID if self.num_left(sequence.request) == 1 else TOKEN_ID)
        return RunnerOutput(tokens)

    def meet(self, groups: Iterable[DecodeGroup]) -> bool:
        """Whether the requests of each group all had a token, and the last one at the same time, which their
        group hears of."""
        for group in groups:
            flights = [self._flights[member.request.request_id] for member in group.members]
            group.at = flights[0].last_token_at
            if any(f.last_token_at != group.at or f.first_token_at is None for f in flights):
                return False
        return True

    def tell(self, outputs: list[RequestOutput], now: float) -> list[Ended]:
        """Books what a step gave. Returns what ended with it, still to be removed."""
        together: dict[tuple[PriorityClass, float], int] = {}
        ended: list[Ended] = []
        for output in outputs:
            request = output.request
            flight = self._flights[request.request_id]
            if output.token_ids:
                if flight.first_token_at is None:
                    flight.first_token_at = now
                else:
                    key = request.priority, flight.last_token_at
                    together[key] = together.get(key, 0) + 1
                if self._token_log is not None:
                    self._token_log.append((flight.number, flight.num_tokens, now))
                flight.num_tokens += 1
                flight.last_token_at = now
            if output.finish_reason is not None:
                ended.append(Ended(flight, request, output.finish_reason, output.error))
        for (priority, last), num_seqs in together.items():
            self._gaps[priority].add(now, now - last, num_seqs)
        return ended

    def tell_group(self, group: DecodeGroup, ends: list[float]) -> None:
        """Books the next steps of a group: each gives a token to all in it. Their flights hear of it by
        `catch_up`."""
        if self._token_log is not None:
            for request, position in group.positions():
                number = self._flights[request.request_id].number
                self._token_log += [(number, position + i, at) for i, at in enumerate(ends)]
        gaps = [at - last for last, at in zip([group.at, *ends], ends, strict=False)]
        for log, num_seqs in zip(self._gaps, group.num_by_class, strict=True):
            if num_seqs:
                log.extend(ends, gaps, num_seqs)
        group.at = ends[-1]

    def catch_up(self, request: Request, last_token_at: float) -> Flight:
        """Its flight knows now of the tokens that it got in a run."""
        flight = self._flights[request.request_id]
        flight.num_tokens, flight.last_token_at = len(request.output_token_ids), last_token_at
        return flight

    def remove(self, request: Request) -> None:
        del self._flights[request.request_id], self._num_output_tokens[request.request_id]
