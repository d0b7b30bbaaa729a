-- What each day's requests cost at the price valid when each was accepted. Without a price the costs are NULL and
-- `priced` is false. class_discount: less than the same tokens in class interactive; cached_discount: less than
-- if nothing had been cached.
CREATE OR REPLACE VIEW headrace.costs AS
SELECT
    u.day AS day,
    u.tenant AS tenant,
    u.model AS model,
    u.class AS class,
    p.currency != '' AS priced,
    nullIf(toString(p.currency), '') AS currency,
    if(priced, p.valid_from, NULL) AS price_valid_from,
    if(priced, p.input_price, NULL) AS input_price,
    if(priced, p.cached_input_price, NULL) AS cached_input_price,
    if(priced, p.output_price, NULL) AS output_price,
    sum(u.requests) AS requests,
    sum(u.uncached_tokens) AS uncached_tokens,
    sum(u.cached_tokens) AS cached_tokens,
    sum(u.output_tokens) AS output_tokens,
    uncached_tokens * (toDecimal128(input_price, 12) / 1000000) AS input_cost,
    cached_tokens * (toDecimal128(cached_input_price, 12) / 1000000) AS cached_input_cost,
    output_tokens * (toDecimal128(output_price, 12) / 1000000) AS output_cost,
    input_cost + cached_input_cost + output_cost AS cost,
    cached_tokens * (toDecimal128(input_price, 12) / 1000000) - cached_input_cost AS cached_discount,
    if(
        i.currency = p.currency,
        uncached_tokens * (toDecimal128(i.input_price, 12) / 1000000)
            + cached_tokens * (toDecimal128(i.cached_input_price, 12) / 1000000)
            + output_tokens * (toDecimal128(i.output_price, 12) / 1000000)
            - cost,
        NULL
    ) AS class_discount
FROM
(
    SELECT
        toDate(accepted_at) AS day,
        tenant,
        model,
        class,
        -- In a day without a change of prices that of its beginning is valid all day: most rows need not be
        -- looked up one by one.
        if(
            day IN (SELECT toDate(valid_from) FROM headrace.price_list WHERE valid_from != toStartOfDay(valid_from)),
            accepted_at,
            toDateTime64(day, 3, 'UTC')
        ) AS instant,
        count() AS requests,
        sum(toUInt64(f.input_tokens - f.cached_tokens)) AS uncached_tokens,
        sum(f.cached_tokens) AS cached_tokens,
        sum(f.output_tokens) AS output_tokens
    FROM headrace.usage AS f FINAL
    GROUP BY day, tenant, model, class, instant
) AS u
ASOF LEFT JOIN headrace.price_list AS p
    ON u.model = p.model AND u.class = p.class AND u.instant >= p.valid_from
ASOF LEFT JOIN (SELECT * FROM headrace.price_list WHERE class = 'interactive') AS i
    ON u.model = i.model AND u.instant >= i.valid_from
GROUP BY day, tenant, model, class, p.currency, p.valid_from, p.input_price, p.cached_input_price, p.output_price,
    i.currency, i.input_price, i.cached_input_price, i.output_price;

-- A line for each price of a tenant's month: SELECT * FROM invoice(tenant = 'acme', month = '2026-11-01').
CREATE OR REPLACE VIEW headrace.invoice AS
SELECT
    model,
    class,
    line.1 AS kind,
    priced,
    currency,
    price_valid_from,
    line.2 AS price,
    sum(line.3) AS tokens,
    sum(line.4) AS amount
FROM headrace.costs
ARRAY JOIN
[
    ('input', input_price, uncached_tokens, input_cost),
    ('cached_input', cached_input_price, cached_tokens, cached_input_cost),
    ('output', output_price, output_tokens, output_cost)
] AS line
WHERE tenant = {tenant:String}
    AND day >= toStartOfMonth({month:Date})
    AND day < addMonths(toStartOfMonth({month:Date}), 1)
    AND line.3 > 0
GROUP BY model, class, kind, priced, currency, price_valid_from, price
ORDER BY model, class, price_valid_from, indexOf(['input', 'cached_input', 'output'], kind), currency, price;

-- Whose requests cost most in a month: SELECT * FROM top_tenants WHERE month = '2026-11-01' LIMIT 10.
CREATE OR REPLACE VIEW headrace.top_tenants AS
SELECT
    toStartOfMonth(day) AS month,
    row_number() OVER (PARTITION BY month, currency ORDER BY cost DESC, output_tokens DESC, tenant) AS rank,
    tenant,
    currency,
    sum(c.cost) AS cost,
    sum(c.requests) AS requests,
    sum(c.uncached_tokens + c.cached_tokens) AS input_tokens,
    sum(c.output_tokens) AS output_tokens
FROM headrace.costs AS c
GROUP BY month, tenant, currency
ORDER BY month, currency, rank;

-- Computed and not billed. recomputed_tokens: again, after a preemption or by a retry. unbilled: what a run told of
-- a request above what its billed row has (it was waived, failed by our fault, or a run went on beside its
-- successor). A run that died without a row is seen only in what its successor computed again.
CREATE OR REPLACE VIEW headrace.not_billed AS
SELECT
    day,
    tenant,
    model,
    class,
    count() AS requests,
    countIf(attempts > 1) AS retried_requests,
    sum(r.recomputed) AS recomputed_tokens,
    sum(greatest(toInt64(r.uncached) - toInt64(r.billed_uncached), 0)) AS unbilled_input_tokens,
    sum(greatest(toInt64(r.output) - toInt64(r.billed_output), 0)) AS unbilled_output_tokens
FROM
(
    SELECT
        tenant,
        request_id,
        toDate(accepted_at) AS day,
        argMax(model, version) AS model,
        argMax(class, version) AS class,
        max(attempt) AS attempts,
        sum(recomputed_tokens) AS recomputed,
        maxIf(input_tokens - cached_tokens, NOT sealed) AS uncached,
        maxIf(output_tokens, NOT sealed) AS output,
        argMax(input_tokens - cached_tokens, version) AS billed_uncached,
        argMax(output_tokens, version) AS billed_output
    FROM headrace.usage_rows FINAL
    -- Only what outranks a worker's first word has another one below it.
    WHERE (tenant, request_id) IN
    (
        SELECT tenant, request_id FROM headrace.usage_rows WHERE attempt > 1 OR sealed OR recomputed_tokens > 0
    )
    GROUP BY tenant, request_id, day
) AS r
WHERE attempts > 1 OR recomputed > 0 OR uncached > billed_uncached OR output > billed_output
GROUP BY day, tenant, model, class;

-- Times in ms: to the first token at the worker, whole requests, and between output tokens.
CREATE OR REPLACE VIEW headrace.latencies AS
SELECT
    toDate(accepted_at) AS day,
    tenant,
    model,
    class,
    count() AS requests,
    quantilesTDigest(0.5, 0.95, 0.99)(f.first_token_ms) AS first_token_ms_p50_p95_p99,
    quantilesTDigest(0.5, 0.95, 0.99)(dateDiff('millisecond', accepted_at, ended_at)) AS total_ms_p50_p95_p99
FROM headrace.usage AS f FINAL
WHERE finish_reason IN ('stop', 'length')
GROUP BY day, tenant, model, class;
