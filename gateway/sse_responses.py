"""The events of OpenAI's /v1/responses, byte by byte.

`sequence_number` is a function of the log alone, so that any gateway goes on with `starting_after` exactly
behind what the client has:

    0 created · 1 in_progress · 2 output_item.added · 3 content_part.added
    4 + p      output_text.delta of the token at output position p
    4 + n …    output_text.done · content_part.done · output_item.done · the end, with n output tokens

Numbers grow and may skip: a token that completes no character shows nothing and has no event. An end that no
worker told (`response.failed`) comes behind the last text. `error` ends this reading and not the response: it
repeats the number of the event before it. A cancelled response ends with `response.incomplete`, for want
of an event of its own; its status says what it is.

Source: OpenAI API reference, "Streaming events" of the Responses API.
"""

from collections.abc import Callable
from typing import Any

from gateway.reader import StreamReader
from gateway.sse import KEEP_ALIVE, to_json
from schemas.api.answers import message_id, output_text
from schemas.api.errors import ApiError
from schemas.api.response_object import ended_response, failed_response, item_status, output_item, output_part
from schemas.records import Completion
from schemas.tokenization import Tokenizer

_CREATED, _IN_PROGRESS, _ITEM_ADDED, _PART_ADDED, _FIRST_TEXT = range(5)
NOTHING_SENT = -1


def position_behind(sequence_number: int) -> int:
    """The output position that a client has which has the events up to `sequence_number`; -1: no text."""
    return max(-1, sequence_number - _FIRST_TEXT)


class ResponseFrames:
    """One output text. Nothing up to the number `starting_after` is sent."""

    def __init__(
        self,
        created: dict[str, Any],
        request_id: bytes,
        tokenizer: Tokenizer,
        reader: StreamReader,
        logprobs: Callable[[int | None], list[dict[str, Any]]],
        has_ended: Callable[[], bool],
        starting_after: int = NOTHING_SENT,
    ) -> None:
        """`logprobs(position)`: of the tokens up to a position (None: all) that were not asked for before.
        `has_ended()`: an error is the end of the request, not only of this reading."""
        self._created = created
        self._request_id = request_id
        self._tokenizer = tokenizer
        self._reader = reader
        self._take_logprobs = logprobs
        self._has_ended = has_ended
        self._after = starting_after
        self._number = starting_after
        self._opened = False
        self._plain = reader.told is None
        self._known_position: int | None = position_behind(starting_after)
        self._logprobs: list[Any] = []
        self._place = {"item_id": message_id(request_id), "output_index": 0, "content_index": 0}
        self._text_middle = b',%b,"delta":' % to_json(self._place)[1:-1]

    def first(self) -> bytes:
        created = self._event("created", _CREATED, -1, response=self._created)
        return created + self._open() if self._reader.bound else created

    def text(self, text: str, position: int) -> bytes:
        opening = b"" if self._opened else self._open()
        self._number = number = _FIRST_TEXT + position
        return (
            b"%bevent: response.output_text.delta\nid: %d\n"
            b'data: {"type":"response.output_text.delta","sequence_number":%d%b%b,"logprobs":%b}\n\n'
            % (
                opening,
                position,
                number,
                self._text_middle,
                to_json(text),
                b"[]" if self._plain else to_json(self._take(position)),
            )
        )

    def done(self, completion: Completion) -> bytes:
        number, position = _FIRST_TEXT + completion.output_tokens, completion.output_tokens - 1
        ids = self._reader.token_ids
        text = output_text(self._tokenizer, ids, completion.finish_reason, completion.text_length)
        self._take(None)
        part = output_part(text, self._logprobs)
        item = output_item(self._request_id, item_status(completion.finish_reason), [part])
        response = ended_response(
            self._created, self._request_id, self._reader.model, completion, text, self._logprobs
        )
        status = response["status"]
        kind = status if status in ("completed", "failed") else "incomplete"
        return (
            (b"" if self._opened else self._open())
            + self._event(
                "output_text.done", number, position, **self._place, text=text, logprobs=self._logprobs
            )
            + self._event("content_part.done", number + 1, position, **self._place, part=part)
            + self._event("output_item.done", number + 2, position, output_index=0, item=item)
            + self._event(kind, number + 3, position, response=response)
        )

    def error(self, error: ApiError) -> bytes:
        if not self._has_ended():
            fields = {"code": error.code, "message": error.message, "param": error.param}
            data = to_json({"type": "error", "sequence_number": self._number, **fields})
            return b"event: error\ndata: %b\n\n" % data
        pieces = self._tokenizer.detokenizer().pieces(self._reader.shown_ids)
        last = max((position for position, piece in enumerate(pieces) if piece), default=-1)
        response = failed_response(
            self._created, self._request_id, self._reader.model, error, "".join(pieces)
        )
        kind = "failed" if response["status"] == "failed" else "incomplete"
        return self._event(kind, _FIRST_TEXT + last + 1, None, response=response)

    def keep_alive(self) -> bytes:
        return KEEP_ALIVE

    def _open(self) -> bytes:
        """What is said once a run is bound, or at the first text."""
        self._opened = True
        response = {**self._created, "status": "in_progress", "model": self._reader.model}
        item = output_item(self._request_id, "in_progress", [])
        return (
            self._event("in_progress", _IN_PROGRESS, -1, response=response)
            + self._event("output_item.added", _ITEM_ADDED, -1, output_index=0, item=item)
            + self._event("content_part.added", _PART_ADDED, -1, **self._place, part=output_part(""))
        )

    def _take(self, position: int | None) -> list[Any]:
        """Log probabilities of the tokens up to a position, or of all that are left. Those of tokens that the
        client has are not told again, and stand in the last events all the same."""
        if self._known_position is not None:
            known, self._known_position = self._known_position, None
            if known >= 0:
                self._logprobs += self._take_logprobs(known)
        told = self._take_logprobs(position)
        self._logprobs += told
        return told

    def _event(self, kind: str, number: int, position: int | None, **fields: Any) -> bytes:
        if number <= self._after:
            return b""
        self._number = number
        name = f"response.{kind}"
        event_id = b"" if position is None else b"id: %d\n" % position
        data = to_json({"type": name, "sequence_number": number, **fields})
        return b"event: %b\n%bdata: %b\n\n" % (name.encode(), event_id, data)
