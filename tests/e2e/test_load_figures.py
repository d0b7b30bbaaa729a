"""Each figure that the fleet is watched and scaled by stands on the page of the process it belongs to."""

import httpx
from prometheus_client.parser import text_string_to_metric_families

from schemas.priority import PriorityClass
from tests.e2e.conftest import RunningStack
from tests.e2e.test_streams import eventually

MODEL = "simulated"
CLASSES = [priority.label for priority in PriorityClass]
# By process: samples, each with its labels. Histograms are named by their counts: percentiles come of those.
FIGURES: dict[str, list[tuple[str, dict[str, list[str]]]]] = {
    "admission-0": [
        # How long requests waited, and wait.
        ("headrace_admission_queue_seconds_count", {"class": CLASSES}),
        ("headrace_admission_queued_requests", {"class": CLASSES}),
        ("headrace_admission_drain_tokens_per_second", {"model": [MODEL], "class": CLASSES}),
        # What is given up.
        ("headrace_admission_shed_level", {"model": [MODEL]}),
        ("headrace_admission_shed_requests_total", {"level": ["cap_free", "fair_share", "refuse_free"]}),
        ("headrace_admission_kv_use", {"model": [MODEL]}),
        # Tokens per GPU-second.
        ("headrace_admission_served_tokens_total", {"model": [MODEL]}),
        ("headrace_admission_gpu_seconds_total", {"model": [MODEL]}),
        # Predicted, real, and the one less the other.
        ("headrace_admission_predicted_first_token_seconds_count", {"class": CLASSES}),
        ("headrace_admission_first_token_seconds_count", {"class": CLASSES}),
        ("headrace_admission_first_token_error_seconds_count", {"class": CLASSES}),
        ("headrace_admission_prefix_hit_tokens", {"kind": ["predicted", "actual"]}),
    ],
    "gateway-0": [
        ("gen_ai_server_time_to_first_token_seconds_count", {"priority": CLASSES}),
        ("gen_ai_server_time_per_output_token_seconds_count", {"priority": CLASSES}),
    ],
    "worker-0": [
        ("vllm:kv_cache_usage_perc", {"model_name": [MODEL]}),
        ("vllm:num_requests_running", {"model_name": [MODEL]}),
        ("vllm:num_requests_waiting", {"model_name": [MODEL]}),
        ("vllm:request_queue_time_seconds_count", {"model_name": [MODEL]}),
        ("vllm:time_to_first_token_seconds_count", {"model_name": [MODEL]}),
        ("vllm:inter_token_latency_seconds_count", {"model_name": [MODEL]}),
        ("headrace_predicted_step_seconds", {"model_name": [MODEL]}),
    ],
}


def page(running: RunningStack, process: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Samples by name."""
    text = httpx.get(f"{running.stack.url(process)}/metrics", timeout=10.0).text
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_every_figure_is_on_the_page_of_its_process(simulated_stack: RunningStack) -> None:
    for priority in ("interactive", "free"):
        answer = simulated_stack.generate(prompt="Hello", max_tokens=4, priority=priority)
        assert answer.status_code == 200, answer.text
    missing = []
    for process, figures in FIGURES.items():
        found = page(simulated_stack, process)
        for name, labels in figures:
            there = [sample_labels for sample_labels, _ in found.get(name, [])]
            missing += [
                f"{process}: {name} {label}={value}"
                for label, values in labels.items()
                for value in values
                if not any(sample.get(label) == value for sample in there)
            ]
    assert missing == []

    def moved() -> bool:
        """They are fed: what the two requests did shows."""
        admission, gateway = page(simulated_stack, "admission-0"), page(simulated_stack, "gateway-0")
        counted = [
            {labels[label]: value for labels, value in samples}
            for samples, label in (
                (admission["headrace_admission_queue_seconds_count"], "class"),
                (admission["headrace_admission_first_token_error_seconds_count"], "class"),
                (gateway["gen_ai_server_time_to_first_token_seconds_count"], "priority"),
                (gateway["gen_ai_server_time_per_output_token_seconds_count"], "priority"),
            )
        ]
        rates = ("headrace_admission_served_tokens_total", "headrace_admission_gpu_seconds_total")
        return all(each["interactive"] and each["free"] for each in counted) and all(
            admission[name][0][1] > 0 for name in rates
        )

    eventually(moved)
