import dataclasses
import json
import logging
from pathlib import Path

import pytest

from schemas.config import CommonConfig, ConfigError, describe, from_env, setting
from schemas.kafka_login import KafkaLogin, client_settings, login_of
from schemas.logs import JsonFormatter
from schemas.object_store import store_errors


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


def test_a_login_is_with_the_servers_and_shown_nowhere(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("s3cret\n")
    base = {"HEADRACE_KAFKA": "a:1,b:2", "HEADRACE_KAFKA_USER": "headrace"}
    for more in ({"HEADRACE_KAFKA_PASSWORD_FILE": str(file)}, {"HEADRACE_KAFKA_PASSWORD": "s3cret"}):
        config = from_env(ExampleConfig, {**base, **more, "HEADRACE_KAFKA_TLS": "true"})
        assert config.kafka == "a:1,b:2"
        assert login_of(config.kafka) == KafkaLogin("headrace", "s3cret", tls=True)
        settings = client_settings(config.kafka)
        assert settings["bootstrap_servers"] == "a:1,b:2"
        assert (settings["security_protocol"], settings["sasl_mechanism"]) == ("SASL_SSL", "SCRAM-SHA-512")
        assert (settings["sasl_plain_username"], settings["sasl_plain_password"]) == ("headrace", "s3cret")
        assert "s3cret" not in repr(config)
        assert "s3cret" not in repr(login_of(config.kafka))
    assert client_settings(from_env(ExampleConfig, {"HEADRACE_KAFKA": "a:1"}).kafka) == {
        "bootstrap_servers": "a:1"
    }


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"USER": "u"}, "needs either HEADRACE_KAFKA_PASSWORD or HEADRACE_KAFKA_PASSWORD_FILE"),
        ({"USER": "u", "PASSWORD": "p", "PASSWORD_FILE": "/f"}, "needs either"),
        ({"USER": "u", "PASSWORD_FILE": "/none"}, "HEADRACE_KAFKA_PASSWORD_FILE: /none cannot be read"),
        ({"USER": "u", "PASSWORD_FILE": "/dev/null"}, "/dev/null is empty"),
        ({"PASSWORD": "s3cret"}, "HEADRACE_KAFKA_PASSWORD is for a HEADRACE_KAFKA_USER"),
        ({"TLS": "1"}, "HEADRACE_KAFKA_TLS is for a HEADRACE_KAFKA_USER"),
    ],
)
def test_half_a_login_is_none(given: dict[str, str], said: str) -> None:
    variables = {f"HEADRACE_KAFKA_{name}": value for name, value in given.items()}
    with pytest.raises(ConfigError, match=said) as error:
        from_env(ExampleConfig, {"HEADRACE_KAFKA": "a:1", **variables})
    assert len(error.value.errors) == 1
    assert "s3cret" not in str(error.value)


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


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "can be written"),
        ("{tmp}/a-file", "can be written"),
        ("{tmp}/a-file/below", "can be written"),
        ("file://{tmp}/a-file", "can be written"),
        ("s4://secret@bucket", "no URL of a store"),
        ("s3://", "no URL of a store"),
        ("memory:///", "not shared"),
        ("http://[", "no URL of a store"),
    ],
)
def test_what_is_no_object_store_is_told_before_it_is_used(tmp_path: Path, url: str, said: str) -> None:
    (tmp_path / "a-file").write_bytes(b"")
    (found,) = store_errors(url.replace("{tmp}", str(tmp_path)))
    assert said in found
    assert "HEADRACE_OBJECT_STORE" in found
    assert "secret" not in found


@pytest.mark.parametrize(
    "url", ["{tmp}", "{tmp}/not/made/yet", "file://{tmp}/x", "not/made", "s3://bucket/a"]
)
def test_an_object_store_may_be_made_later(tmp_path: Path, url: str) -> None:
    assert store_errors(url.replace("{tmp}", str(tmp_path))) == []
    assert not list(tmp_path.iterdir())
