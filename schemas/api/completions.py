"""Body of OpenAI's /v1/completions."""

from typing import Annotated, Any

from msgspec import Meta, Struct

from schemas.api import fields
from schemas.api.bodies import StreamOptions
from schemas.api.choices import MAX_N

MAX_LOGPROBS = 5


class CompletionBody(Struct, forbid_unknown_fields=True):
    """POST /v1/completions. Fields that are not served stand here for a refusal that names them."""

    model: str
    prompt: str | list[str | int | list[int]]
    max_tokens: fields.Positive | None = None
    temperature: fields.Temperature | None = None
    top_p: fields.TopP | None = None
    top_k: fields.TopK | None = None
    seed: fields.Seed | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    priority: str | None = None
    allow_fallback: bool = True
    ignore_eos: bool = False
    stop_token_ids: fields.StopIds | None = None
    user: str | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    best_of: fields.Positive | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    stop: fields.OpenAIStop | None = None
    presence_penalty: fields.Penalty | None = None
    frequency_penalty: fields.Penalty | None = None
    logit_bias: fields.LogitBiases | None = None
    echo: bool | None = None
    suffix: str | None = None

    def unsupported(self) -> str | None:
        """The first field that asks for what is not served."""
        asked: tuple[tuple[str, Any], ...] = (("echo", self.echo), ("suffix", self.suffix))
        return next((name for name, value in asked if value), None)
