"""Prometheus metrics of the ledger. No label is a tenant."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

REGISTRY = CollectorRegistry()

ROWS = Counter("headrace_ledger_rows", "Usage rows inserted.", registry=REGISTRY)
INSERTS = Histogram(
    "headrace_ledger_insert_seconds",
    "Time of one insert.",
    registry=REGISTRY,
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)
INSERT_FAILURES = Counter(
    "headrace_ledger_insert_failures", "Inserts that failed and are tried again.", registry=REGISTRY
)
DLQ = Counter("headrace_ledger_dlq", "Records put into a dead-letter topic.", ["source"], registry=REGISTRY)
LAG = Gauge(
    "headrace_ledger_lag", "Usage records not yet committed, by partition.", ["partition"], registry=REGISTRY
)
SQL_QUERIES = Counter(
    "headrace_ledger_sql_queries", "SQL queries by outcome.", ["outcome"], registry=REGISTRY
)
BATCH_OPEN = Gauge(
    "headrace_batch_open", "Batch requests read and not answered.", ["shard"], registry=REGISTRY
)
BATCH_FINISHED = Counter(
    "headrace_batch_finished", "Batch requests answered.", ["outcome"], registry=REGISTRY
)
BATCH_RETRIES = Counter("headrace_batch_retries", "Retries of batch requests.", registry=REGISTRY)
BATCH_FLUSH = Histogram(
    "headrace_batch_flush_seconds", "Time of one transaction of results.", registry=REGISTRY
)
