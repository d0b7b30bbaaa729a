"""How tokens are chosen and told: the records inside requests and token chunks. See avro/ for every field."""

from dataclasses import dataclass, field

GRAMMAR_KINDS = ("json_schema", "regex", "lark")

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_LOGIT_BIASES = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_TOP_LOGPROBS = 20
MAX_GRAMMAR_BYTES = 64 * 1024


@dataclass(slots=True)
class LogitBias:
    token_id: int
    bias: float


@dataclass(slots=True)
class Grammar:
    kind: str
    source: str


@dataclass(slots=True)
class SamplingParams:
    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] = field(default_factory=list)
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: list[LogitBias] = field(default_factory=list)
    min_tokens: int = 0
    stop: list[str] = field(default_factory=list)
    logprobs: int | None = None
    grammar: Grammar | None = None


@dataclass(slots=True)
class TokenLogprobs:
    logprob: float
    top_token_ids: list[int]
    top_logprobs: list[float]
