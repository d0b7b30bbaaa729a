"""Processes: a prefill worker computes wrong tokens and hands a prompt over; its canary finds it out then."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.chaos_run import failpoints
from infra.local.verbs import VerbsError, ensure_verbs
from schemas.records import Heartbeat, Left
from tests.integration.test_worker_handoffs import (
    DECODE,
    PREFILL,
    a_request,
    expected_tokens,
    figures,
    hand_over,
)
from tests.own_broker import own_broker
from tests.service_process import ServiceProcess
from tests.worker_harness import LAYOUT, WorkerProcess, handoff_client

CANARY_S = 5.0  # a prompt is handed over and adopted between two


@pytest.fixture(scope="module")
def bootstrap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with own_broker(tmp_path_factory.mktemp("broker"), LAYOUT) as broker:
        yield broker.bootstrap_servers


class BreakableWorker(WorkerProcess):
    """Its tokens are wrong while a file is there."""

    def __init__(self, bootstrap: str, slot: int, folder: Path, settings: dict[str, str]) -> None:
        armed = {failpoints.ARMED: str(folder), "HEADRACE_RUNNER": "simulated"}
        command = [failpoints.__name__, "worker"]
        ServiceProcess.__init__(
            self, command, "worker", bootstrap, LAYOUT, slot, folder, {**armed, **settings}
        )
        self._wrong = folder / f"{failpoints.WRONG}-{slot}"

    def compute_wrong(self) -> None:
        self._wrong.touch()


@pytest.fixture
def workers(bootstrap: str, tmp_path: Path) -> Iterator[tuple[BreakableWorker, WorkerProcess]]:
    try:
        env = ensure_verbs(os.environ, print)
    except VerbsError as error:
        pytest.skip(str(error))
    settings = {name: env[name] for name in ("LD_LIBRARY_PATH",) if name in env} | {
        "HEADRACE_MODELS_DIR": str(tmp_path / "models"),
        "HEADRACE_STEP_MS": "10",
        "HEADRACE_KV_MEMORY_MIB": "16",
        "HEADRACE_MAX_MODEL_LEN": "4000",
        "HEADRACE_CANARY_S": str(CANARY_S),
    }
    prefill = BreakableWorker(bootstrap, PREFILL, tmp_path, {**settings, "HEADRACE_WORKER_ROLE": "prefill"})
    decode = WorkerProcess(bootstrap, DECODE, tmp_path, {**settings, "HEADRACE_WORKER_ROLE": "decode"})
    try:
        for worker in (prefill, decode):
            worker.wait_ready()
        yield prefill, decode
    finally:
        for worker in (prefill, decode):
            worker.kill()


async def test_what_a_prefill_worker_computed_wrong_is_disowned_by_decode_and_nothing_else(
    workers: tuple[BreakableWorker, WorkerProcess], bootstrap: str
) -> None:
    prefill, decode = workers
    async with handoff_client(bootstrap) as client:

        def passed() -> int:
            heartbeat: Heartbeat | None = client.heartbeat(PREFILL)
            return 0 if heartbeat is None or heartbeat.worker is None else heartbeat.worker.canary_passed

        before = a_request(200, 3500)
        await hand_over(client, before)
        await client.wait_for(lambda: client.tokens(before))
        then = passed()
        await client.wait_for(lambda: passed() > then + 1)  # one that began behind it
        prefill.compute_wrong()
        wrong = a_request(300, 3500)
        wrong.prompt_token_ids[0] = 33
        epoch, _ = await hand_over(client, wrong)
        completion, usage = await client.end(wrong)
        assert (completion.value.finish_reason, completion.value.slot) == ("engine_fault", DECODE)
        told = client.tokens(wrong)
        assert completion.value.output_tokens == usage.value.output_tokens == len(told) > 0
        assert told[0] != expected_tokens(wrong)[0], "it was handed over before it was wrong"
        await client.wait_for(lambda: client.values(Left))
        assert client.values(Left) == [Left("worker", PREFILL, epoch, "canary_failed")]
        assert figures(decode)['headrace_handoffs_total{outcome="doubted"}'] == 1
        # What its canary had vouched for goes on.
        so_far = len(client.tokens(before))
        await client.wait_for(lambda: len(client.tokens(before)) > so_far + 10)
        assert client.tokens(before) == expected_tokens(before)[: len(client.tokens(before))]
        assert not client.state(before).ended
