CREATE DATABASE IF NOT EXISTS headrace;

CREATE TABLE IF NOT EXISTS headrace.usage
(
    request_id    String COMMENT 'hexadecimal',
    tenant        LowCardinality(String),
    version       UInt64 COMMENT 'attempt, sealed, output_tokens and a tie-break, packed: the highest row counts',
    attempt       UInt16,
    sealed        Bool COMMENT 'written by the owner, over what the worker wrote',
    class         LowCardinality(String),
    model         LowCardinality(String),
    input_tokens  UInt64,
    cached_tokens UInt64 COMMENT 'part of input_tokens',
    output_tokens UInt64,
    finish_reason LowCardinality(String),
    accepted_at   DateTime64(3, 'UTC') COMMENT 'the same in all attempts: price and partition follow it',
    ended_at      DateTime64(3, 'UTC'),
    slot          Nullable(UInt32),
    epoch         Nullable(UInt64)
)
ENGINE = ReplacingMergeTree(version)
PARTITION BY toYYYYMM(accepted_at)
ORDER BY (tenant, request_id)
-- An insert that returned lets Kafka's offsets be committed, so it must outlive a power cut.
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1;
