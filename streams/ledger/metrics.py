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
ARCHIVE_LAG = Gauge(
    "headrace_ledger_archive_lag_seconds",
    "Age of the oldest usage record that is in the topic alone, by partition; up to a day is right.",
    ["partition"],
    registry=REGISTRY,
)
ARCHIVED = Counter("headrace_ledger_archived", "Usage records archived.", registry=REGISTRY)
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
SWEPT = Counter(
    "headrace_ledger_swept",
    "Expired files, and orphaned objects, taken out of the object store.",
    ["what"],
    registry=REGISTRY,
)
STORE_FAILURES = Counter(
    "headrace_batch_store_failures", "Requests to the object store that were tried again.", registry=REGISTRY
)
BATCH_JOBS = Gauge("headrace_batch_jobs", "Jobs that have not ended.", ["shard"], registry=REGISTRY)
SPEND_SECONDS = Histogram(
    "headrace_ledger_spend_seconds",
    "Time of asking the table what tenants that have a budget have spent.",
    registry=REGISTRY,
    buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
SPEND_FAILURES = Counter(
    "headrace_ledger_spend_failures",
    "Times that it could not be asked or told what tenants spent: budgets are held later.",
    registry=REGISTRY,
)
BUDGET_ALERTS = Counter(
    "headrace_ledger_budget_alerts", "Times that a tenant had spent so much of its budget.", registry=REGISTRY
)
