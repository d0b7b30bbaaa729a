from prometheus_client import CollectorRegistry, generate_latest

from schemas.records import Dispatch
from tests.worker_harness import make_inference_request
from workers.batch import PreemptionMode, PreemptionReason
from workers.engine_stats import EngineStats
from workers.live_requests import LiveRequests
from workers.metrics import Histogram, WorkerMetrics
from workers.request import FinishReason


def test_histogram_buckets_are_cumulative_and_include_their_bound() -> None:
    histogram = Histogram([1, 2])
    for value in (0.5, 1.0, 1.5, 99.0):
        histogram.observe(value)
    assert histogram.buckets() == ([("1", 2), ("2", 3), ("+Inf", 4)], 102.0)


def test_a_request_shows_in_all_figures() -> None:
    stats = EngineStats(
        num_running=3,
        num_waiting=(1, 0, 4),
        num_blocks=10,
        free_blocks=4,
        num_host_blocks=8,
        free_host_blocks=2,
        kv_fragmentation=0.03,
        prefix_cache_queries=100,
        prefix_cache_hits=64,
        num_preemptions=2,
        preemptions={(PreemptionReason.NO_FREE_BLOCK, PreemptionMode.SWAP): 2},
        step_time_ms=20.0,
        predicted_step_ms=18.0,
    )
    metrics = WorkerMetrics("gemma", lambda: stats, lambda: 5)
    registry = CollectorRegistry()
    registry.register(metrics)
    taken = LiveRequests(0, 9, "simulated", 300).on_dispatch(
        Dispatch(0, 9, 5, make_inference_request(prompt_len=8)), now=1.0
    )
    assert taken is not None
    live = taken[0]
    metrics.on_admitted(live, 1.5)
    metrics.on_admitted(live, 9.0)  # preempted and admitted again
    metrics.on_tokens(live, 1, 2.0)
    metrics.on_tokens(live, 1, 2.02)
    metrics.on_end(live, FinishReason.STOP, 2.1)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"model_name": "gemma", **labels})

    assert value("vllm:num_requests_running") == 3
    assert value("vllm:num_requests_waiting") == 5
    assert value("vllm:kv_cache_usage_perc") == 0.6
    assert value("vllm:num_preemptions_total") == 2
    assert value("headrace_preemptions_total", reason="no_free_block", mode="swap") == 2
    assert value("vllm:prefix_cache_queries_total") == 100
    assert value("vllm:prefix_cache_hits_total") == 64
    assert value("headrace_kv_fragmentation") == 0.03
    assert value("headrace_swap_usage_perc") == 0.75
    assert value("headrace_step_seconds") == 0.02
    assert value("headrace_predicted_step_seconds") == 0.018
    assert value("headrace_decisions_dropped_total") == 5
    assert value("vllm:prompt_tokens_total") == 8
    assert value("vllm:generation_tokens_total") == 2
    assert value("vllm:request_success_total", finished_reason="stop") == 1
    assert value("vllm:request_queue_time_seconds_sum") == 0.5
    assert value("vllm:request_queue_time_seconds_count") == 1
    assert value("vllm:time_to_first_token_seconds_sum") == 1.0
    assert value("vllm:request_prefill_time_seconds_sum") == 0.5
    assert value("vllm:inter_token_latency_seconds_bucket", le="0.025") == 1
    assert value("vllm:inter_token_latency_seconds_bucket", le="0.01") == 0
    assert b"vllm:e2e_request_latency_seconds_count" in generate_latest(registry)
