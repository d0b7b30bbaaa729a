"""The accounts of a chaos run name what was lost or wrong; and the figures of faults."""

import dataclasses

import pytest

from infra.benchmarks.returning_client import Delivery
from infra.chaos_run.accounts import check_clients, simulated_text
from infra.chaos_run.impact import Hurt, impact
from infra.chaos_run.records import ClientRecord, End

ID = bytes(range(16))


def record(tokens: int = 5, end: End = End.DONE, **changes: object) -> ClientRecord:
    at = [10.0 + i / 100 for i in range(tokens)]
    delivery = Delivery(request_id=ID, stream_id="s", at=at)
    made = ClientRecord("stream", "acme", "hi", 5, 9.0, delivery, end)
    delivery.text = list(simulated_text(made, tokens))
    if end is End.DONE:
        delivery.done = {"usage": {"input_tokens": 3, "output_tokens": tokens}}
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def found(*records: ClientRecord, wrong: tuple[tuple[float, float], ...] = ()) -> list[str]:
    return check_clients(records, simulated_text, wrong)


def test_what_was_right_is_not_found() -> None:
    assert found(record(), record(3, End.LEFT), record(0, End.REFUSED), record(0, End.UNANSWERED)) == []


@pytest.mark.parametrize("change", ["dropped", "doubled", "swapped", "other"])
def test_each_token_is_looked_at(change: str) -> None:
    told = record()
    text = told.delivery.text
    match change:
        case "dropped":
            del text[2]
        case "doubled":
            text.insert(2, text[2])
        case "swapped":
            text[1], text[2] = text[2], text[1]
        case "other":
            text[3] = chr(ord(text[3]) ^ 1)
    (finding,) = found(told)
    assert finding.startswith("wrong text")
    assert ID.hex() in finding


def test_a_stream_that_broke_off_is_lost_and_one_that_ends_early_is_told() -> None:
    (lost,) = found(record(3, End.FAILED, status=404))
    assert lost.startswith("a stream was lost")
    (short,) = found(record(4))
    assert short.startswith("4 of 5 tokens")


def test_while_a_worker_computes_wrong_tokens_only_engine_fault_may_end_a_stream() -> None:
    while_wrong = ((9.5, 11.0),)
    fault = record(3, End.FAILED, detail="{'code': 'engine_fault'}")
    assert found(fault, wrong=while_wrong) == []
    assert len(found(fault, wrong=((11.0, 12.0),))) == 1
    assert len(found(record(3, End.FAILED, detail="worker_lost"), wrong=while_wrong)) == 1


def test_tokens_of_a_prompt_are_counted_once() -> None:
    told, other, twice = record(), record(), record()
    for each, tokens in ((told, 3), (other, 3), (twice, 6)):
        assert each.delivery.done is not None
        each.delivery.done["usage"]["input_tokens"] = tokens
    (finding,) = found(told, other, twice)
    assert finding.startswith("6 tokens of input, elsewhere 3")


def test_a_fault_is_told_by_the_streams_that_waited() -> None:
    hurt = Hurt("killed", "worker-0", 10.0, 11.0, 14.0, 10_000, 14_000, 300.0)
    waited, before, retried = record(), record(), record()
    waited.delivery.at = [9.9, 10.1, 11.3, 11.4, 15.0]  # what comes after the fault is another's
    before.delivery.at = [9.0, 9.9]
    retried.delivery.at = [9.95, 10.05, 10.15]
    retried.delivery.request_id = b"r" * 16
    figures = impact(hurt, [waited, before, retried], 500.0, [(b"r" * 16, 10_500), (b"r" * 16, 20_000)])
    assert (figures["streams"], figures["affected"], figures["retries"]) == (2, 2, 1)
    assert (figures["gap_ms_max"], figures["recovered_ms"], figures["unserved_ms"]) == (1200, 1300, 300)
