-- What control.prices says. Prices are of a million tokens; a token's has at most 12 digits behind the point.
CREATE TABLE IF NOT EXISTS headrace.prices
(
    model              LowCardinality(String),
    class              LowCardinality(String),
    valid_from         DateTime64(3, 'UTC') COMMENT 'for requests accepted from then on, until the next one',
    currency           LowCardinality(String),
    input_price        Decimal(18, 6) COMMENT 'of a million input tokens that were not cached',
    cached_input_price Decimal(18, 6) COMMENT 'of a million input tokens that were cached',
    output_price       Decimal(18, 6) COMMENT 'of a million output tokens',
    removed            Bool,
    version            UInt64 COMMENT 'offset in control.prices: the highest counts'
)
ENGINE = ReplacingMergeTree(version)
ORDER BY (model, class, valid_from)
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1;

CREATE OR REPLACE VIEW headrace.price_list AS
SELECT model, class, valid_from, currency, input_price, cached_input_price, output_price
FROM headrace.prices FINAL
WHERE NOT removed;
