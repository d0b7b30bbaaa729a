"""Settings of a worker over several ranks: what cannot be is refused with the setting's name."""

import dataclasses

import pytest

from schemas.catalog import Deployment, simulated_model
from schemas.config import ConfigError
from workers.config import load_config

KAFKA = {"HEADRACE_KAFKA": "127.0.0.1:1"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"HEADRACE_TENSOR_PARALLEL": "0"}, "HEADRACE_TENSOR_PARALLEL must be at least 1, got 0"),
        (
            {"HEADRACE_TENSOR_PARALLEL": "2", "HEADRACE_RUNNER": "simulated"},
            "HEADRACE_TENSOR_PARALLEL is 2: simulated GPUs have HEADRACE_SIMULATED_TENSOR_PARALLEL",
        ),
        (
            {"HEADRACE_TENSOR_PARALLEL": "2", "HEADRACE_LINEAR": "int8"},
            "HEADRACE_TENSOR_PARALLEL is 2: several ranks multiply in bf16, but HEADRACE_LINEAR is 'int8'",
        ),
        ({"HEADRACE_TENSOR_PARALLEL": "two"}, "HEADRACE_TENSOR_PARALLEL='two' is not a valid int"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(KAFKA | settings)
    assert caught.value.errors == [message]


def num_ranks(entry: int | None, **settings: str) -> int:
    deployment = None if entry is None else Deployment(entry, 80, "bf16", "bf16")
    spec = dataclasses.replace(simulated_model(), id="mine", deployment=deployment)
    named = {f"HEADRACE_{name}": value for name, value in settings.items()}
    return load_config(KAFKA | named).num_ranks(spec)


def test_a_model_has_as_many_ranks_as_its_entry_says_unless_the_setting_does() -> None:
    assert num_ranks(None) == 1
    assert num_ranks(1) == 1
    assert num_ranks(8) == 8
    assert num_ranks(8, TENSOR_PARALLEL="") == 8
    assert num_ranks(8, TENSOR_PARALLEL="2") == 2
    assert num_ranks(8, TENSOR_PARALLEL="1", LINEAR="int8") == 1
    assert num_ranks(None, TENSOR_PARALLEL="2") == 2
    assert num_ranks(8, RUNNER="simulated") == 1


def test_what_does_not_go_with_the_entry_is_refused_with_what_overrides_it() -> None:
    with pytest.raises(ConfigError) as caught:
        num_ranks(8, LINEAR="int8", WORKER_ROLE="decode")
    told = "; so says the catalogue entry of 'mine', and HEADRACE_TENSOR_PARALLEL overrides it"
    assert caught.value.errors == [
        "HEADRACE_TENSOR_PARALLEL is 8: several ranks multiply in bf16, but HEADRACE_LINEAR is 'int8'" + told,
        "HEADRACE_WORKER_ROLE is decode: a model over 8 ranks hands no KV over yet; set "
        "HEADRACE_TENSOR_PARALLEL to 1, or the role to unified" + told,
    ]
