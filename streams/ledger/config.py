"""What the ledger is told."""

from dataclasses import dataclass
from pathlib import Path

from schemas.config import CommonConfig, setting
from schemas.object_store import store_errors
from streams.ledger.clickhouse import CHDB_SCHEME, QueryLimits, chdb_folder

ROLE = "ledger"
DDL_DIR = Path(__file__).parents[2] / "infra" / "clickhouse"


@dataclass(frozen=True, kw_only=True)
class LedgerConfig(CommonConfig):
    data_dir: Path = setting(Path(".headrace/ledger"), doc="Folder of the embedded ClickHouse and its lock.")
    clickhouse: str = setting(
        "", doc="chdb:///folder, or http(s)://user:password@host:port; empty: chDB in data_dir."
    )
    object_store: str = setting(
        ".headrace/objects",
        doc="Where files and old usage are: a folder, or s3://bucket/prefix with the provider's variables.",
    )
    sweep_s: float = setting(3_600.0, doc="Seconds between looks for files whose time is over.")
    archive_s: float = setting(3_600.0, doc="Seconds between looks for usage of past days to archive.")
    ddl_dir: Path = setting(DDL_DIR, doc="Folder of the numbered SQL files.")
    insert_rows: int = setting(5_000, doc="Rows of usage in one insert at most.")
    insert_window_ms: int = setting(
        100, doc="How long rows that were fetched are collected for one insert (ms)."
    )
    spend_s: float = setting(
        1.0, doc="Seconds between looks at what tenants that have a budget have spent, where there is news."
    )
    sql_port: int = setting(8123, doc="Port of the read-only SQL endpoint on http_host; 0 picks one.")
    sql_concurrent: int = setting(4, doc="SQL queries at once; more wait 1 s, then are refused.")
    sql_time_s: float = setting(10.0, doc="Time of one SQL query (s).")
    sql_memory_mib: int = setting(256, doc="Memory of one SQL query (MiB).")
    sql_result_rows: int = setting(100_000, doc="Rows that one SQL query may return.")
    batch_window: int = setting(256, doc="Open batch requests a tenant at most.")
    batch_prefix_order: bool = setting(
        True, doc="Lines of a batch's file that begin alike are sent together; else as they stand."
    )
    batch_end_ms: int = setting(86_400_000, doc="A batch request not answered by then is an error (ms).")

    def dsn(self) -> str:
        return self.clickhouse or f"{CHDB_SCHEME}{(self.data_dir / 'clickhouse').resolve()}"

    def query_limits(self) -> QueryLimits:
        return QueryLimits(
            time_s=self.sql_time_s,
            memory_bytes=self.sql_memory_mib << 20,
            result_rows=self.sql_result_rows,
        )

    def errors(self) -> list[str]:
        found = [*super().errors(), *store_errors(self.object_store)]
        folder = chdb_folder(self.clickhouse)
        if folder is not None and not folder.is_absolute():
            found.append("HEADRACE_CLICKHOUSE: chdb:// takes an absolute folder, chdb:///folder")
        if self.clickhouse and folder is None and not self.clickhouse.startswith(("http://", "https://")):
            # Not quoted: it may hold a password.
            found.append("HEADRACE_CLICKHOUSE must begin with chdb:///, http:// or https://")
        if not self.ddl_dir.is_dir():
            found.append(f"HEADRACE_DDL_DIR: no folder {self.ddl_dir}")
        if not 0 <= self.sql_port < 65536:
            found.append(f"HEADRACE_SQL_PORT must be 0 to 65535, got {self.sql_port}")
        positive = (
            "sweep_s",
            "archive_s",
            "insert_rows",
            "spend_s",
            "insert_window_ms",
            "sql_concurrent",
            "sql_time_s",
            "sql_memory_mib",
            "sql_result_rows",
            "batch_window",
            "batch_end_ms",
        )
        found += [
            f"HEADRACE_{name.upper()} must be above 0, got {getattr(self, name)}"
            for name in positive
            if getattr(self, name) <= 0
        ]
        return found
