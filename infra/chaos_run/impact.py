"""What a fault did to the streams that ran: whose tokens waited, for how long, and when all was as before."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from infra.benchmarks.figures import percentile
from infra.chaos_run.records import ClientRecord, End


@dataclass(frozen=True, slots=True)
class Hurt:
    """A fault that was done. `began`, `over` (its harm done and put right) and `until` (quiet again): seconds
    of `time.perf_counter`; `began_ms`, `until_ms`: of the epoch. `unserved_ms`: for so long no new
    request was answered."""

    fault: str
    what: str
    began: float
    over: float
    until: float
    began_ms: int
    until_ms: int
    unserved_ms: float


def impact(
    hurt: Hurt, records: Iterable[ClientRecord], affected_ms: float, retried: Sequence[tuple[bytes, int]]
) -> dict[str, object]:
    """Figures in ms. A stream is affected when it waited longer than `affected_ms` between two events, was
    retried or came back; `retried`: (request_id, when). `recovered_ms` is from the fault's begin to the
    last end of such a wait."""
    again = {request_id for request_id, at in retried if hurt.began_ms <= at <= hurt.until_ms}
    gaps, affected, recovered, streams = [], 0, 0.0, 0
    for record in records:
        at = record.delivery.at
        if not at or record.kind in ("slow", "resumes") or at[-1] < hurt.began or record.began > hurt.until:
            continue
        streams += 1
        times = [a for a in at if a <= hurt.began][-1:] + [a for a in at if hurt.began < a <= hurt.until]
        waits = [(later - earlier, later) for earlier, later in pairwise(times)]
        longest, ended = max(waits, default=(0.0, 0.0))
        if longest * 1000 > affected_ms or record.delivery.request_id in again or record.delivery.away_ms:
            affected += 1
            gaps.append(longest * 1000)
            recovered = max(recovered, ended - hurt.began)
    recovered_ms = max(recovered * 1000, hurt.unserved_ms)
    refused = [r for r in records if hurt.began <= r.began <= hurt.until and r.end is End.REFUSED]
    return {
        "fault": hurt.fault,
        "done_to": hurt.what,
        "lasted_ms": round((hurt.over - hurt.began) * 1000),
        "streams": streams,
        "affected": affected,
        "gap_ms_p50": round(percentile(gaps, 0.5)) if gaps else 0,
        "gap_ms_max": round(max(gaps, default=0.0)),
        "recovered_ms": round(recovered_ms),
        "unserved_ms": round(hurt.unserved_ms),
        "refused": len(refused),
        "retries": sum(hurt.began_ms <= at <= hurt.until_ms for _, at in retried),
    }
