ALTER TABLE headrace.usage
    ADD COLUMN IF NOT EXISTS first_token_ms Nullable(UInt64) COMMENT 'from the worker''s read of the Dispatch to the first token of this attempt',
    ADD COLUMN IF NOT EXISTS recomputed_tokens UInt64 COMMENT 'computed again by this attempt: after a preemption, or what the attempt before it had';

-- All versions of all rows, of which merges leave one in usage: what was computed and not billed shows here.
CREATE TABLE IF NOT EXISTS headrace.usage_rows AS headrace.usage
ENGINE = ReplacingMergeTree
PARTITION BY toYYYYMM(accepted_at)
ORDER BY (tenant, request_id, version)
TTL toDateTime(accepted_at) + INTERVAL 93 DAY
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1;

CREATE OR REPLACE VIEW headrace.usage_final AS
SELECT * FROM headrace.usage FINAL;
