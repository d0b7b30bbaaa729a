"""One step in the making: what it holds, and what it may still take."""

from schemas.priority import PriorityClass
from workers.batch import ScheduledSequence, SchedulerOutput
from workers.request import Request
from workers.scheduler_config import SchedulerConfig
from workers.step_time import StepTimeModel, num_attended_pairs

# While a stream runs, the first interactive prompt gets at least so many tokens a step, and as many as take
# half as long as the rest of the step: where the target is out of reach, they still get a third of the time.
_MIN_INTERACTIVE_CHUNK = 32
# A prompt of a lower class is not begun, or gone on with, for fewer: a step costs more than they do.
_MIN_CHUNK = 16


class StepPlan:
    """Tokens are bounded by `max_num_batched_tokens`, with a place for every decode.

    Time is bounded while an interactive sequence is in the step: the predicted time must meet the inter-token
    target. Interactive decodes are in it whatever they take. Interactive prompts are cut for them (where no
    stream waits for a token there is nobody to cut them for); lower classes get what is left, if anything.
    """

    def __init__(self, config: SchedulerConfig, step_time: StepTimeModel, num_decodes: int) -> None:
        """`num_decodes` sequences are to be decoded: `num_unsettled` of them were not decided on yet."""
        self.output = SchedulerOutput()
        self.decodes: list[ScheduledSequence] = []
        self.chunks: list[ScheduledSequence] = []
        self.num_unsettled = num_decodes
        self.has_interactive_decode = False
        self.has_interactive_chunk = False
        self.computing: dict[bytes, Request] = {}
        """Who computes the block of this hash in this step."""
        self._config = config
        self._target_s = config.inter_token_target_ms / 1000
        self._time = step_time
        self._num_chunk_tokens = 0
        self._num_context_tokens = 0
        self._num_pairs = 0

    @property
    def num_tokens_left(self) -> int:
        taken = self._num_chunk_tokens + len(self.decodes) + self.num_unsettled
        return self._config.max_num_batched_tokens - taken

    @property
    def is_timed(self) -> bool:
        """Whether lower classes must heed the inter-token target."""
        return self._target_s > 0 and (self.has_interactive_decode or self.has_interactive_chunk)

    def add_context(self, num_context_tokens: int) -> None:
        """Books the lengths of sequences that were appended to `decodes`."""
        self._num_context_tokens += num_context_tokens

    def num_decodes_in_time(self, requests: list[Request]) -> int:
        """How many of these decodes, from the first on, keep the step within its time."""
        if not self.is_timed:
            return len(requests)
        time = self._time
        limit = time.line_for(self._target_s, self._num_further > 0)
        seconds = time.line(*self._load())
        room = time.max_num_seqs - len(self.decodes) - len(self.chunks)
        num = 0
        for request in requests[: max(0, room)]:
            seconds += time.per_seq + time.per_context * (request.num_computed_tokens + 1)
            if seconds > limit:
                break
            num += 1
        return num

    def chunk_size(self, request: Request, num_computed_tokens: int) -> int:
        """Tokens of the request that the step takes next; 0: it must wait."""
        remaining = request.num_tokens - num_computed_tokens
        num_tokens = min(remaining, self.num_tokens_left, self._config.max_prefill_chunk)
        interactive = request.priority is PriorityClass.INTERACTIVE
        if self._target_s > 0 and (self.has_interactive_decode if interactive else self.is_timed):
            in_time = self._num_tokens_in_time(num_computed_tokens)
            if interactive:
                if in_time < num_tokens and not self.has_interactive_chunk:
                    in_time = max(in_time, self._interactive_floor(num_computed_tokens))
                num_tokens = min(num_tokens, in_time)
            elif in_time < min(remaining, _MIN_CHUNK):
                return 0
            else:
                num_tokens = min(num_tokens, in_time)
        return max(0, num_tokens)

    def add_chunk(self, request: Request, num_tokens: int) -> None:
        end = request.num_computed_tokens + num_tokens
        self.chunks.append(ScheduledSequence(request, num_tokens, end == request.num_tokens))
        self._num_chunk_tokens += num_tokens
        self._num_context_tokens += end
        self._num_pairs += num_attended_pairs(request.num_computed_tokens, num_tokens - 1)
        if request.priority is PriorityClass.INTERACTIVE:
            self.has_interactive_chunk = True

    def drop(self, request: Request) -> None:
        """Takes a request out that was preempted."""
        for sequences in (self.decodes, self.chunks):
            # The last to run are the first to be preempted.
            for index in range(len(sequences) - 1, -1, -1):
                if sequences[index].request is request:
                    num_tokens = sequences.pop(index).num_scheduled_tokens
                    self._num_context_tokens -= request.num_computed_tokens + num_tokens
                    if sequences is self.chunks:
                        self._num_chunk_tokens -= num_tokens
                        self._num_pairs -= num_attended_pairs(request.num_computed_tokens, num_tokens - 1)
                    return

    def predicted_s(self) -> float:
        return self._time.predict(*self._load())

    def finish(self) -> SchedulerOutput:
        output = self.output
        output.total_num_scheduled_tokens = len(self.decodes) + self._num_chunk_tokens
        output.num_sampled = len(self.decodes) + sum(chunk.samples for chunk in self.chunks)
        output.num_context_tokens = self._num_context_tokens
        output.num_attended_pairs = self._num_pairs
        output.predicted_s = self.predicted_s()
        output.scheduled = self.decodes + self.chunks if self.chunks else self.decodes
        return output

    def _num_tokens_in_time(self, num_computed_tokens: int) -> int:
        time = self._time
        known = time.max_num_tokens - self._num_further
        first = time.per_seq + time.per_context * (num_computed_tokens + 1)
        left_s = time.line_for(self._target_s, True) - time.line(*self._load()) - first
        if left_s < 0 or known < 0:
            return 0
        return 1 + min(known, time.num_further_in(left_s, num_computed_tokens))

    def _interactive_floor(self, num_computed_tokens: int) -> int:
        time = self._time
        fair = 0
        if time.per_token + time.per_context:
            fair = time.num_further_in(time.line(*self._load()) / 2, num_computed_tokens)
        return max(_MIN_INTERACTIVE_CHUNK, fair)

    @property
    def _num_further(self) -> int:
        """Tokens beyond the first one of each sequence."""
        return self._num_chunk_tokens - len(self.chunks)

    def _load(self) -> tuple[int, int, int, int]:
        num_seqs = len(self.decodes) + len(self.chunks)
        return num_seqs, self._num_further, self._num_context_tokens, self._num_pairs
