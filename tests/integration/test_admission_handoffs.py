"""An admission process on a real broker, in a fleet of a prefill and a decode worker that only heartbeat."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.records import Dispatch, Dispatched, KVLayout, Unpaired
from tests.admission_harness import (
    LAYOUT,
    MODEL,
    AdmissionProcess,
    Fleet,
    fleet,
    make_request,
    make_tenant,
    worker,
)
from tests.own_broker import own_broker

KV = KVLayout(16, "bfloat16", 1, 32, 8, 128)


def missing(client: Fleet) -> list[bool]:
    """What admission said of the decode pool, in order."""
    told = [seen.value for seen in client.seen if isinstance(seen.value, Unpaired)]
    return [event.is_missing for event in told if (event.model, event.role) == (MODEL, "decode")]


@pytest.fixture
def bootstrap(tmp_path: Path) -> Iterator[str]:
    with own_broker(tmp_path / "broker", LAYOUT) as broker:
        yield broker.bootstrap_servers


@pytest.fixture
def admission(bootstrap: str, tmp_path: Path) -> Iterator[AdmissionProcess]:
    process = AdmissionProcess(bootstrap, tmp_path)
    try:
        process.wait_ready()
        yield process
        assert process.stop() == 0, process.log_file.read_text()
    finally:
        process.kill()


@pytest.mark.usefixtures("admission")
async def test_a_handoff_reaches_prefill_and_a_pool_that_goes_is_told_to_all(bootstrap: str) -> None:
    async with fleet(bootstrap) as client:
        await client.put_tenant(make_tenant())
        busy = {"num_running": 4, "max_num_seqs": 64}
        async with worker(client, 0, worker_role="prefill", kv_layout=KV) as (prefill, _):
            async with worker(client, 1, worker_role="decode", kv_layout=KV, **busy) as (decode, _):
                await client.read_for(0.4)  # heartbeats of both
                request = make_request(prompt_token_ids=[1] * 600)
                await client.send(request)
                told = await client.answer(request, Dispatched)
                assert (told.slot, told.epoch) == (1, decode)
                assert (told.prefill_slot, told.prefill_epoch) == (0, prefill)
                dispatch = await client.answer(request, Dispatch)
                assert (dispatch.slot, dispatch.epoch, dispatch.request) == (0, prefill, request)
                assert dispatch.pairing is not None
                assert (dispatch.pairing.decode_slot, dispatch.pairing.decode_epoch) == (1, decode)
                told_before = len(missing(client))
            await client.wait_for(lambda: missing(client)[told_before:])
            assert missing(client)[-1]
            whole = make_request(prompt_token_ids=[1] * 600)
            await client.send(whole)
            assert (await client.answer(whole, Dispatched)).slot == 0
            assert (await client.answer(whole, Dispatch)).pairing is None
