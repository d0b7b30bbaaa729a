from pathlib import Path

import pytest

from schemas.config import ConfigError, from_env
from streams.ledger.config import LedgerConfig

GOOD = {"HEADRACE_KAFKA": "127.0.0.1:9092"}


def test_defaults_hold_the_projects_own_schema() -> None:
    config = from_env(LedgerConfig, {**GOOD, "HEADRACE_DATA_DIR": "/data"})
    assert config.dsn() == "chdb:///data/clickhouse"
    assert (config.ddl_dir / "001_usage.sql").is_file()
    assert config.query_limits().memory_bytes == 256 << 20


def test_all_errors_at_once_and_no_password() -> None:
    with pytest.raises(ConfigError) as caught:
        from_env(
            LedgerConfig,
            {
                **GOOD,
                "HEADRACE_CLICKHOUSE": "ftp://user:secret@host",
                "HEADRACE_DDL_DIR": "/no/such",
                "HEADRACE_SQL_PORT": "70000",
                "HEADRACE_INSERT_ROWS": "0",
            },
        )
    text = str(caught.value)
    for name in ("CLICKHOUSE", "DDL_DIR", "SQL_PORT", "INSERT_ROWS"):
        assert f"HEADRACE_{name}" in text
    assert "secret" not in text


def test_a_relative_chdb_folder_is_refused() -> None:
    with pytest.raises(ConfigError, match="absolute"):
        from_env(LedgerConfig, {**GOOD, "HEADRACE_CLICKHOUSE": "chdb://data"})
    assert from_env(LedgerConfig, {**GOOD, "HEADRACE_CLICKHOUSE": "chdb:///d"}).dsn() == "chdb:///d"


def test_a_server_needs_no_folder() -> None:
    config = from_env(LedgerConfig, {**GOOD, "HEADRACE_CLICKHOUSE": "https://user:pw@host:8443"})
    assert config.dsn() == "https://user:pw@host:8443"
    assert isinstance(config.data_dir, Path)
