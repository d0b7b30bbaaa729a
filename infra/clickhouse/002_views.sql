-- One row per request, whatever has been merged so far.
CREATE OR REPLACE VIEW headrace.usage_final AS
SELECT * FROM headrace.usage FINAL;

-- What finance reads.
CREATE OR REPLACE VIEW headrace.billing AS
SELECT
    toDate(accepted_at) AS day,
    tenant,
    model,
    class,
    count() AS requests,
    sum(u.input_tokens) AS input_tokens,
    sum(u.cached_tokens) AS cached_tokens,
    sum(u.output_tokens) AS output_tokens
FROM headrace.usage AS u FINAL
GROUP BY day, tenant, model, class;
