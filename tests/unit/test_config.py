import dataclasses
import json
import logging
from pathlib import Path

import pytest

from schemas.config import CommonConfig, ConfigError, describe, from_env, setting
from schemas.logs import JsonFormatter


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExampleConfig(CommonConfig):
    step_ms: float = setting(0.0, doc="Step time, ms.")
    deterministic: bool = setting(False, doc="Equal output whatever the batch.")
    memory_mib: int | None = setting(None, doc="KV memory, MiB; empty: by free memory.")


def test_values_are_read_and_defaults_kept() -> None:
    config = from_env(
        ExampleConfig,
        {
            "HEADRACE_KAFKA": "127.0.0.1:9092",
            "HEADRACE_STEP_MS": "5.75",
            "HEADRACE_DETERMINISTIC": "1",
            "HEADRACE_MODELS": "a, b",
            "PATH": "/bin",
        },
    )
    assert (config.kafka, config.step_ms, config.deterministic) == ("127.0.0.1:9092", 5.75, True)
    assert (config.shards, config.memory_mib, config.model_ids()) == (4, None, ["a", "b"])
    assert config.models_dir == Path(".headrace/models")


def test_all_errors_come_at_once_and_name_the_variable() -> None:
    with pytest.raises(ConfigError) as e:
        from_env(
            ExampleConfig,
            {
                "HEADRACE_STEP_MS": "fast",
                "HEADRACE_DETERMINISTIC": "maybe",
                "HEADRACE_STEPMS": "1",
            },
        )
    text = str(e.value)
    assert len(e.value.errors) == 4
    assert "HEADRACE_STEPMS is not a setting; did you mean HEADRACE_STEP_MS?" in text
    assert "HEADRACE_STEP_MS='fast' is not a valid float" in text
    assert "HEADRACE_DETERMINISTIC='maybe'" in text
    assert "HEADRACE_KAFKA is not set: Bootstrap servers" in text


def test_values_out_of_range_are_reported_together() -> None:
    with pytest.raises(ConfigError) as e:
        from_env(
            ExampleConfig,
            {
                "HEADRACE_KAFKA": "x",
                "HEADRACE_SHARDS": "0",
                "HEADRACE_SLOT": "-1",
                "HEADRACE_LOG_LEVEL": "LOUD",
            },
        )
    assert len(e.value.errors) == 3


def test_every_variable_is_described() -> None:
    text = describe(ExampleConfig)
    assert "HEADRACE_KAFKA (required): Bootstrap servers" in text
    assert "HEADRACE_STEP_MS (default 0.0): Step time, ms." in text


def test_a_log_line_is_json_with_its_extras() -> None:
    record = logging.LogRecord("x", logging.INFO, __file__, 1, "dispatched %s", ("r",), None)
    record.request_id = bytes(2)
    line = json.loads(JsonFormatter("admission", 3).format(record))
    assert line["message"] == "dispatched r"
    assert (line["service"], line["slot"], line["request_id"]) == ("admission", 3, "0000")
