"""Requests of one engine that are decoded in the same steps: blocks and ends come at known ones."""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from operator import attrgetter

from schemas.priority import PriorityClass
from workers.batch import ScheduledSequence
from workers.request import Request

order = attrgetter("order")


@dataclass(slots=True, eq=False)
class Member:
    """A running request. `order` is its place in the batch, `end` the step that gives its last token; up to
    `synced` it has its tokens. `bucket` has those whose blocks are due in the same steps, in their order."""

    request: Request
    order: tuple[PriorityClass, int]
    end: int
    bucket: list["Member"]
    synced: int
    sequence: ScheduledSequence


class DecodeGroup:
    """Steps are counted from 1 on; `num_done` of them were carried out, the last one at `at` (s), when all
    had their last token. `num_by_class` are its members, `num_context_tokens` their computed tokens."""

    def __init__(self, block_size: int, token_id: int) -> None:
        """All tokens but the last of a request are `token_id`."""
        self.members: list[Member] = []
        self.num_by_class = [0] * len(PriorityClass)
        self.num_context_tokens = 0
        self.num_done = 0
        self.at = 0.0
        self._token_id = token_id
        self._buckets: list[list[Member]] = [[] for _ in range(block_size)]
        # A heap by end; of those that end together, the first in the batch goes first.
        self._by_end: list[tuple[int, tuple[PriorityClass, int], Member]] = []

    @property
    def num_steps_left(self) -> int:
        """Steps up to the next end of a member."""
        return self._by_end[0][0] - self.num_done

    def positions(self) -> Iterator[tuple[Request, int]]:
        """Each request, and the output position of its next token."""
        done = self.num_done
        return ((m.request, len(m.request.output_token_ids) + done - m.synced) for m in self.members)

    def due(self, num_steps: int) -> list[Member]:
        """Who needs a block in the step that is so many steps ahead, in their order."""
        return self._buckets[(self.num_done + num_steps) % len(self._buckets)]

    def join(self, request: Request, num_left: int) -> None:
        """A running request that lacks one token; `num_left` are to come."""
        num_computed = request.num_computed_tokens
        # A block is due where the table is full, and then every block_size steps.
        bucket = self._buckets[(self.num_done + 1 - num_computed) % len(self._buckets)]
        member = Member(
            request,
            (request.priority, request.arrival),
            self.num_done + num_left,
            bucket,
            self.num_done,
            ScheduledSequence(request, 1, True),
        )
        self.members.append(member)
        insort(bucket, member, key=order)
        heappush(self._by_end, (member.end, member.order, member))
        self.num_by_class[request.priority] += 1
        self.num_context_tokens += num_computed

    def advance(self, num_steps: int) -> list[Member]:
        """Steps of all members, up to the next end at most. Returns those that end with the last, in their
        order: they are to leave."""
        self.num_context_tokens += num_steps * len(self.members)
        step = self.num_done = self.num_done + num_steps
        ending: list[Member] = []
        while self._by_end and self._by_end[0][0] == step:
            ending.append(heappop(self._by_end)[-1])
        return ending

    def leave(self, member: Member) -> None:
        """One that `advance` gave, and that has ended."""
        self.members.remove(member)
        member.bucket.remove(member)
        self.num_by_class[member.request.priority] -= 1
        # Context tokens of a request that has ended are of no step to come: prompt and output but the last.
        self.num_context_tokens -= member.request.num_tokens - 1

    def sync(self, member: Member, step: int) -> None:
        """Gives its request the tokens up to a step."""
        num_tokens = step - member.synced
        if num_tokens <= 0:
            return
        member.synced = step
        request = member.request
        request.num_computed_tokens += num_tokens
        request.output_token_ids.extend([self._token_id] * num_tokens)
