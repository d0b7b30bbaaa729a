"""Whether clients were shown what they should, and the log and the bill say the same."""

from collections.abc import Awaitable, Callable, Iterable, Sequence

from infra.audit.audit import Settings, audit
from infra.audit.checks import Tolerances
from infra.audit.clients import ClientRecord as Received
from infra.chaos_run.records import ClientRecord, End
from infra.local.stack import Stack
from schemas.object_store import open_store
from workers.simulated_runner import SimulatedRunner

Ask = Callable[[str, int], Awaitable[str]]
ExpectedText = Callable[[ClientRecord, int], str]
_LATE_MS = 3_000
_ENGINE_FAULT = "engine_fault"


def simulated_text(record: ClientRecord, tokens: int) -> str:
    """What the simulated model gives for this request: a character a token."""
    runner = SimulatedRunner(vocab_size=127, first_token_id=32)  # printable bytes, as workers have it
    return "".join(chr(runner.token_at(record.delivery.request_id, i)) for i in range(tokens))


async def reference_text(ask: Ask, prompts: Iterable[str], tokens: int) -> ExpectedText:
    """What a model gives for each prompt while nothing is done to it; `ask` gets a prompt and a number of
    tokens. A client that was shown fewer tokens was shown the beginning of that.
    """
    texts = {prompt: await ask(prompt, tokens) for prompt in prompts}
    return lambda record, _: texts[record.prompt][: len("".join(record.delivery.text))]


def check_clients(
    records: Iterable[ClientRecord], expected: ExpectedText, wrong: Sequence[tuple[float, float]]
) -> list[str]:
    """`wrong`: when a worker computed wrong tokens (from, to). What ran then may have been shown some, and
    may end with engine_fault; all else is as ever."""
    found = []
    prompts: dict[str, int] = {}
    for record in records:
        delivery = record.delivery
        last = delivery.at[-1] if delivery.at else record.began
        doubtful = any(record.began < to and last > since for since, to in wrong)
        if record.end is End.FAILED:
            if not (doubtful and _ENGINE_FAULT in record.detail):
                found.append(f"a stream was lost: {record.as_json()}")
            continue
        text = "".join(delivery.text)
        if record.end is End.DONE and record.output_tokens != record.max_tokens:
            found.append(f"{record.output_tokens} of {record.max_tokens} tokens: {record.as_json()}")
        if delivery.done is not None:
            # Equal prompts have equal numbers of tokens, however often they were begun anew.
            input_tokens = delivery.done["usage"]["input_tokens"]
            if prompts.setdefault(record.prompt, input_tokens) != input_tokens:
                elsewhere = prompts[record.prompt]
                found.append(f"{input_tokens} tokens of input, elsewhere {elsewhere}: {record.as_json()}")
        tokens = record.output_tokens if record.end is End.DONE else len(text)
        if not doubtful and text != expected(record, tokens):
            found.append(f"wrong text {text!r}: {record.as_json()}")
    return found


async def check_log(
    stack: Stack, since_ms: int, records: Iterable[ClientRecord], *, with_ids: bool, held_up_ms: int
) -> tuple[list[str], dict[str, int]]:
    """What `headrace audit` finds of all that was accepted since then, and how much it has looked at.

    `with_ids`: the clients' text tells each token's id, as the simulated model's does. `held_up_ms`: the log
    took nothing for so long at a time; cancels and the tokens before them came so much later.
    """
    received: dict[bytes, list[Received]] = {}
    for record in records:
        if record.end in (End.DONE, End.LEFT):
            text = "".join(record.delivery.text)
            ids = list(text.encode()) if with_ids else None
            end = "length" if record.end is End.DONE else None
            told = Received(record.delivery.request_id, 200, record.output_tokens, ids, end)
            received.setdefault(told.request_id, []).append(told)
    settings = Settings(
        since_ms=since_ms,
        sql=stack.sql_url,
        objects=open_store(str(stack.config.data_dir / "objects")),
        allowed=Tolerances(
            cancel_ms=_LATE_MS + held_up_ms,
            in_flight_ms=_LATE_MS + held_up_ms,
            transfer_ms=_LATE_MS + held_up_ms,
        ),
    )
    report = await audit(stack.bootstrap_servers, stack.config.layout, settings, received)
    found = [f"{f.kind.value}: {f.request_id} of {f.tenant}, {f.figures}" for f in report.findings]
    return found + [f"not judged: {each}" for each in report.not_judged], dict(report.looked_at)
