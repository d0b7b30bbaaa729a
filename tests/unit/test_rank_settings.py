"""Settings of a worker over several ranks: what cannot be is refused with the setting's name."""

import pytest

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


def test_a_model_in_one_process_multiplies_as_it_is_told() -> None:
    assert load_config(KAFKA | {"HEADRACE_LINEAR": "int8"}).tensor_parallel == 1
    assert load_config(KAFKA | {"HEADRACE_TENSOR_PARALLEL": "2"}).tensor_parallel == 2
