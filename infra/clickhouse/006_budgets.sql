-- When operators were told that a tenant has spent so much of a month's budget. The first word counts.
CREATE TABLE IF NOT EXISTS headrace.alerts
(
    tenant    LowCardinality(String),
    month     Date COMMENT 'its first day',
    percent   UInt8 COMMENT 'of the budget as it was then',
    threshold Decimal(38, 12),
    currency  LowCardinality(String),
    spent     Decimal(38, 12) COMMENT 'when it was told',
    told_at   DateTime64(3, 'UTC'),
    version   UInt64 COMMENT 'higher for an earlier word'
)
ENGINE = ReplacingMergeTree(version)
ORDER BY (tenant, month, threshold, currency)
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1;

CREATE OR REPLACE VIEW headrace.budget_alerts AS
SELECT tenant, month, percent, threshold, currency, spent, told_at
FROM headrace.alerts FINAL;
