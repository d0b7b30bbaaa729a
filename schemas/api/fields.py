"""Types of fields that several bodies have. Each says its range, so that a refusal can name it."""

from typing import Annotated

from msgspec import Meta

from schemas.sampling import MAX_LOGIT_BIASES, MAX_STOP_CHARACTERS, MAX_STOP_STRINGS

MAX_MESSAGES = 2048
# Of one message, or of a system prompt.
MAX_PARTS = 2048
Positive = Annotated[int, Meta(ge=1)]
TokenId = Annotated[int, Meta(ge=0)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=0, le=2**63 - 1)]
MinP = Annotated[float, Meta(ge=0, le=1)]
MinTokens = Annotated[int, Meta(ge=0)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=2)]
Regex = Annotated[str, Meta(min_length=1)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]
StopStrings = Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)]
Stop = StopString | StopStrings
OpenAIStop = StopString | Annotated[list[StopString], Meta(max_length=4)]
StopIds = Annotated[list[TokenId], Meta(max_length=64)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]
LogitBiases = Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_LOGIT_BIASES)]
