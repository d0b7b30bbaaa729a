"""A batch request of either door: what it asks for, from its body. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

import msgspec

from schemas.api.batches import LINE_BODIES
from schemas.api.bodies import convert_body
from schemas.api.choices import choice_request_id, choice_seed
from schemas.api.errors import ApiError, bad_field
from schemas.api.messages import MessagesBody, prepare_messages
from schemas.api.prepare import Prepared, prepare_choices
from schemas.api.responses import ResponsesBody, prepare_response
from schemas.api.tenant_rules import sampling_for
from schemas.models import LoadedModel
from schemas.priority import PriorityClass
from schemas.records import SamplingParams, Tenant

MAX_CUSTOM_ID = 512
MAX_GROUP = 512


class Shape(Enum):
    GENERATE = auto()
    LINE = auto()
    AVRO = auto()


@dataclass(frozen=True, slots=True)
class Source:
    """Where a record stands and how its answer is to look. `group`: the batch that its header names."""

    tenant: str
    offset: int
    custom_id: str | None = None
    shape: Shape = Shape.GENERATE
    group: str | None = None


@dataclass(frozen=True, slots=True)
class FileSource:
    """Which line of a job's file it is: `index` counts them from 0."""

    tenant: str
    batch_id: str
    index: int
    custom_id: str


@dataclass(frozen=True, slots=True)
class BatchItem:
    """A line to run: one request, or several where it asks for several choices.

    `request_id` is the line's, and its first choice's. `n`: outputs of each prompt; `others`: prompts after
    the first, with what is to be sampled for each. `accepted_at` (ms of the epoch) and `end_ms`, the time it
    has from then on (None: what all have), are the same after any restart. `response`: the body, where that
    is what /v1/responses answers with.
    """

    source: Source | FileSource
    request_id: bytes
    accepted_at: int
    url: str
    model: LoadedModel
    prompt_token_ids: list[int]
    sampling: SamplingParams
    end_ms: int | None = None
    has_tools: bool = False
    service_tier: str | None = None
    response: ResponsesBody | None = None
    n: int = 1
    others: tuple[tuple[list[int], SamplingParams], ...] = ()

    @property
    def num_requests(self) -> int:
        return self.n * (1 + len(self.others))

    @property
    def num_tokens(self) -> int:
        """Of all its requests: the prompt, and the longest output that there may be."""
        return self.n * sum(len(ids) + sampling.max_tokens for ids, sampling in self._prompts())

    def request_ids(self) -> list[bytes]:
        """Of its choices, in order."""
        return [choice_request_id(self.request_id, index) for index in range(self.num_requests)]

    def requests(self) -> "list[BatchItem]":
        """One for each of its choices, in order: ids and seeds are derived as online."""
        if self.num_requests == 1:
            return [self]
        found: list[BatchItem] = []
        for ids, sampling in self._prompts():
            for i in range(self.n):
                choice = replace(
                    self,
                    request_id=choice_request_id(self.request_id, len(found)),
                    prompt_token_ids=ids,
                    sampling=replace(sampling, seed=choice_seed(sampling.seed, i)),
                    n=1,
                    others=(),
                )
                found.append(choice)
        return found

    def _prompts(self) -> list[tuple[list[int], SamplingParams]]:
        return [(self.prompt_token_ids, self.sampling), *self.others]


def check_custom_id(value: object) -> str:
    """Raises ApiError that names it."""
    if value is None:
        raise ApiError(400, "missing_field", "custom_id: this field is required", "custom_id")
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_CUSTOM_ID:
        raise bad_field("custom_id", f"must be a string of 1 to {MAX_CUSTOM_ID} characters")
    return value


def make_item(
    source: Source | FileSource,
    request_id: bytes,
    accepted_at: int,
    url: str,
    body: object,
    models: Mapping[str, LoadedModel],
    rules: Tenant | None,
    end_ms: int | None = None,
) -> BatchItem:
    """Tokenizes: run it in a thread. `url` is one of LINE_BODIES; `rules`: the tenant's record.

    Raises ApiError that names the field.
    """
    parsed = convert_body(body, LINE_BODIES[url])
    if parsed.stream:
        raise bad_field("stream", "a batch request is never streamed")
    choices, response = _prepare(parsed, models)
    prepared = choices[0]
    if prepared.priority not in (None, PriorityClass.BATCH):
        raise bad_field("priority", "a batch request is always of class batch")
    n = getattr(parsed, "n", None) or 1
    prompts = []
    for index in range(0, len(choices), n):
        prompt = choices[index]
        sampling = prompt.sampling
        if rules is not None:
            sampling = sampling_for(rules, PriorityClass.BATCH, prompt)
        if getattr(parsed, "seed", None) is None:
            # Not random: after a restart the request must go on as the same one.
            first_id = choice_request_id(request_id, index)
            sampling = replace(sampling, seed=int.from_bytes(first_id[:8], "big") >> 1)
        prompts.append((prompt.prompt_token_ids, sampling))
    (ids, sampling), *others = prompts
    return BatchItem(
        source=source,
        request_id=request_id,
        accepted_at=accepted_at,
        url=url,
        model=prepared.model,
        prompt_token_ids=ids,
        sampling=sampling,
        end_ms=end_ms,
        has_tools=prepared.has_tools,
        service_tier=prepared.service_tier,
        response=response,
        n=n,
        others=tuple(others),
    )


def _prepare(parsed: Any, models: Mapping[str, LoadedModel]) -> tuple[list[Prepared], ResponsesBody | None]:
    match parsed:
        case MessagesBody():
            return [prepare_messages(parsed, models)], None
        case ResponsesBody():
            if parsed.background:
                raise bad_field("background", "a batch request is answered in its results alone")
            # Nothing can be read again but the results.
            return [prepare_response(parsed, models)], msgspec.structs.replace(parsed, store=False)
        case _:
            return prepare_choices(parsed, models), None
