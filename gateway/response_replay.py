"""A response read back from the log: the stream's replay, and what /v1/responses has to know beside it."""

from typing import Any

from gateway.config import GatewayConfig
from gateway.reader import End
from gateway.replay import RETRY_WAIT_MS, Replay, ReplayReader
from schemas.api.told_tokens import ToldTokens
from schemas.models import LoadedModel
from schemas.records import Completion


class ResponseReader(ReplayReader):
    """Takes log probabilities too, where the worker told any."""

    __slots__ = ()

    def __init__(self, config: GatewayConfig, model: LoadedModel, after: int, now: float) -> None:
        super().__init__(config, model, False, after, now)  # /v1/responses knows no stop strings
        self.told = ToldTokens(model.tokenizer)


class ResponseReplay(Replay):
    """`created` is the response as it was created, once that was read. `caught_up`: all that the log holds
    about the request was read, so its state is that of now."""

    __slots__ = ("response_reader",)

    def __init__(self, request_id: bytes, tenant: str, reader: ResponseReader) -> None:
        super().__init__(request_id, tenant, reader)
        self.response_reader = reader

    @property
    def created(self) -> dict[str, Any] | None:
        return self.fold.created

    @property
    def caught_up(self) -> bool:
        return self.fold.caught_up

    def on_news(self) -> None:
        self.response_reader.on_news()

    def end_by(self, now_ms: int) -> End | None:
        """The end if there is one. `now_ms`: ms of the epoch, as the broker's clock has it.

        Whoever reads for a moment cannot wait and see whether a retry comes: it looks how long ago the
        attempt failed.
        """
        ended_at = self.fold.ended_at
        if self.reader.end is not None or ended_at is None:
            return self.reader.end
        end = self.state.end
        return end if isinstance(end, Completion) and now_ms - ended_at >= RETRY_WAIT_MS else None
