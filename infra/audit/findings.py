"""What an audit may find. Each kind is one promise that was not kept."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

Figures = dict[str, int | str]


class Kind(StrEnum):
    NO_END = "no_end"  # a client got 200, and the log has no end of it
    TWO_ENDS = "two_ends"  # one run ended the same attempt twice
    PAST_DEADLINE = "past_deadline"  # open, and its time is over
    END_DIFFERS = "end_differs"  # a client was told another end than the log's
    NOT_IN_LOG = "not_in_log"  # a client got 200 for what the log does not know
    DROPPED_TOKEN = "dropped_token"
    DOUBLED_TOKEN = "doubled_token"
    WRONG_TOKEN = "wrong_token"  # a client got another token than the one that counts
    LOST_ROW = "lost_row"
    DOUBLED_ROW = "doubled_row"
    WRONG_ROW = "wrong_row"  # the billing table has another row than the one of highest version
    UNKNOWN_ROW = "unknown_row"  # billed, and the log knows no such request
    BILLED_DIFFERS = "billed_differs"  # the row that counts has other tokens than the fold
    REFUSED_BUT_BILLED = "refused_but_billed"
    TWO_RUNS_BILLED = "two_runs_billed"  # two runs of one attempt have rows, and the owner has sealed none
    RETRIED_AFTER_END = "retried_after_end"  # an attempt began that no Retry in the log allowed
    DECODED_AFTER_CANCEL = "decoded_after_cancel"
    LEAKED_RESERVATION = "leaked_reservation"
    LEAKED_BLOCK = "leaked_block"
    OPEN_TRANSFER = "open_transfer"  # of KV: one of its sides has not ended it, and should have
    STRANDED_BLOCKS = "stranded_blocks"  # reserved for a transfer that is over, and may not be used again
    LEAKED_HANDOFF = "leaked_handoff"  # a worker counts a handoff of a request that has ended
    ADOPTED_TWICE = "adopted_twice"
    ADOPTED_UNWRITTEN = "adopted_unwritten"  # a request goes on with KV that nobody said was written
    TRANSFER_ENDS_DIFFER = "transfer_ends_differ"  # one side said two ends of it
    GHOST_SEQUENCE = "ghost_sequence"  # a worker runs something, and no request is open
    LOST_RESULT = "lost_result"  # of a batch item
    DOUBLED_RESULT = "doubled_result"
    BATCH_COUNTS = "batch_counts"  # a batch's state has other sums than its items


@dataclass(frozen=True, slots=True)
class Finding:
    """`request_id` is hexadecimal, None where it is about no single request; so is `tenant`."""

    kind: Kind
    request_id: str | None
    tenant: str | None
    figures: Figures = field(default_factory=dict)


@dataclass(slots=True)
class Report:
    """`looked_at` counts what was judged; `not_judged` says what could not be, and why."""

    findings: list[Finding] = field(default_factory=list)
    looked_at: Counter[str] = field(default_factory=Counter)
    not_judged: list[str] = field(default_factory=list)

    def add(self, findings: Iterable[Finding]) -> None:
        self.findings += findings

    @property
    def clean(self) -> bool:
        return not self.findings

    def kinds(self) -> set[Kind]:
        return {finding.kind for finding in self.findings}
