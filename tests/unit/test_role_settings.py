"""Settings of workers with roles: what cannot be is refused with the setting's name."""

import pytest

from schemas.config import ConfigError
from schemas.handoff_records import WorkerRole
from workers.config import load_config

KAFKA = {"HEADRACE_KAFKA": "127.0.0.1:1"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"HEADRACE_WORKER_ROLE": "both"},
            "HEADRACE_WORKER_ROLE must be unified or prefill or decode, got 'both'",
        ),
        (
            {"HEADRACE_WORKER_ROLE": "prefill", "HEADRACE_TENSOR_PARALLEL": "2"},
            "HEADRACE_WORKER_ROLE is prefill: a model over 2 ranks hands no KV over yet; set "
            "HEADRACE_TENSOR_PARALLEL to 1, or the role to unified",
        ),
        (
            {"HEADRACE_WORKER_ROLE": "decode", "HEADRACE_DEVICE": "cuda"},
            "HEADRACE_WORKER_ROLE is decode: GPUs hand no KV over yet; set it to unified",
        ),
        (
            {"HEADRACE_WORKER_ROLE": "decode", "HEADRACE_TRANSFER_HOST": ""},
            "HEADRACE_WORKER_ROLE is decode: it needs a HEADRACE_TRANSFER_HOST",
        ),
        (
            {"HEADRACE_TRANSFER_PROTOCOL": "memory"},
            "HEADRACE_TRANSFER_PROTOCOL must be tcp or rdma, got 'memory'",
        ),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(KAFKA | settings)
    assert caught.value.errors == [message]


def test_a_worker_is_unified_unless_it_is_told() -> None:
    assert load_config(KAFKA).role is WorkerRole.UNIFIED
    config = load_config(KAFKA | {"HEADRACE_WORKER_ROLE": "prefill"})
    assert (config.role, config.transfer_protocol) == (WorkerRole.PREFILL, "tcp")
