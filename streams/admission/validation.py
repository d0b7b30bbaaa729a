"""What can be wrong with a record that decodes: its owner is told what."""

from collections.abc import Sequence

from schemas.records import InferenceRequest
from schemas.topics import NUM_CLASSES
from streams.admission.refusal import Refusal
from streams.admission.worker import Worker


def invalid_field(request: InferenceRequest, partition: int) -> str | None:
    """The first field that cannot be served, and why; None when all can. `partition` is where it lies."""
    if not 0 <= request.priority < NUM_CLASSES:
        return f"priority: {request.priority} is no class"
    if request.priority != partition % NUM_CLASSES:
        return f"priority: class {request.priority} lies in partition {partition} of another class"
    if request.attempt < 1:
        return f"attempt: {request.attempt} is below 1"
    if not request.prompt_token_ids:
        return "prompt_token_ids: empty"
    if request.sampling.max_tokens < 1:
        return f"sampling.max_tokens: {request.sampling.max_tokens} is below 1"
    # A worker that dies between its last tokens and the end leaves a complete output: the next one ends it.
    if len(request.output_token_ids) > request.sampling.max_tokens:
        return "output_token_ids: more than max_tokens are there already"
    if request.start_ms is not None and request.start_ms < 1:
        return f"start_ms: {request.start_ms} is below 1"
    if request.end_ms < 1:
        return f"end_ms: {request.end_ms} is below 1"
    return None


def oversized(request: InferenceRequest) -> Refusal:
    """Its Dispatch is larger than the records that the workers' topic was made to take."""
    prompt, output = len(request.prompt_token_ids), len(request.output_token_ids)
    message = (
        f"prompt: {prompt} tokens, and {output} of output so far, are more than a record of the log takes"
    )
    return Refusal(413, "request_too_large", message)


def too_long(request: InferenceRequest, workers: Sequence[Worker]) -> Refusal | None:
    """Why none of a model's `workers` can ever run the request, or None. While there are none, who knows."""
    if not workers or any(worker.fits(request) for worker in workers):
        return None
    tokens = len(request.prompt_token_ids) + request.sampling.max_tokens
    longest = max(worker.max_tokens for worker in workers)
    message = f"prompt and max_tokens are {tokens} tokens; model {request.model!r} has room for {longest}"
    return Refusal(400, "context_length_exceeded", message)
