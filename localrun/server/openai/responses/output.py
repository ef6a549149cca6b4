"""The output items of a response, and the events that tell of them, in OpenAI's order.

An item is added, its parts are added, grow, and are done, and then it is done, before the next one begins:

- `reasoning` has the thinking: as reasoning text, or as the summary where the client asked for one
- `message` has the content
- `function_call` or `custom_tool_call` has one call, as `items.py` says

Runs in the task of the request. A response that does not stream builds the same items and drops the events.

Does not: parse what the model wrote, or send.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from localrun.server.openai.answer import Fields, encode, entries
from localrun.server.openai.responses.items import Client, input_of, new_id
from localrun.server.parsing.pieces import CallStart, Content, Piece, Thinking
from localrun.wire import ChosenLogprob


class Events:
    """One stream's events. The first has the number 0."""

    def __init__(self) -> None:
        self._n_sent = 0

    def event(self, kind: str, fields: Fields) -> bytes:
        return self.more(self.opening(kind, fields))

    def opening(self, kind: str, fields: Fields) -> bytes:
        """The beginning of events of one kind that differ in their number, and in what `more` adds."""
        return b"event: %b\ndata: %b" % (kind.encode("ascii"), encode({"type": kind} | fields)[:-1])

    def more(self, opening: bytes, rest: bytes = b"") -> bytes:
        """An event of `opening`, its number, and `rest`: fields as JSON, with a comma before each."""
        number = self._n_sent
        self._n_sent += 1
        return opening + b',"sequence_number":%d' % number + rest + b"}\n\n"


@dataclass
class _Growing:
    """The item that grows, of pieces of one `kind`. `opening` begins its delta events; `event` is what they and the
    last one are called."""

    kind: str
    item: Fields
    index: int
    event: str
    where: Fields
    opening: bytes = b""
    texts: list[str] = field(default_factory=list)
    logprobs: list[Fields] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Output:
    """See the module. `items` are those that are done; `clients` are the tools by the model's names."""

    def __init__(self, events: Events, clients: Mapping[str, Client], *, summarizes: bool) -> None:
        self._clients = clients
        self.items: list[Fields] = []
        self._events = events
        self._summarizes = summarizes
        self._growing: _Growing | None = None
        self._waiting_logprobs: list[ChosenLogprob] = []

    def take(self, pieces: Sequence[Piece], logprobs: Sequence[ChosenLogprob] | None) -> bytes:
        """The events of one delta; may be empty. Only content has log-probabilities."""
        self._waiting_logprobs += logprobs or ()
        told: list[bytes] = []
        for piece in pieces:
            kind = _KINDS.get(type(piece), "function_call")
            growing = self._growing
            if growing is None or growing.kind != kind or isinstance(piece, CallStart):
                told.append(self.end())
                growing = self._begin(kind, piece, told)
            if not isinstance(piece, CallStart):
                told.append(self._grow(growing, piece.text))
        return b"".join(told)

    def end(self, *, status: str = "completed") -> bytes:
        growing, self._growing = self._growing, None
        if growing is None:
            return b""
        growing.item["status"] = status
        told = _ENDS[growing.item["type"]](self, growing)
        self.items.append(growing.item)
        return told + self._tell("response.output_item.done", {"output_index": growing.index, "item": growing.item})

    def finish(self, *, status: str) -> bytes:
        """Nothing more comes. A reply without a word is an empty message."""
        told = b""
        if self._growing is None and not self.items:
            told = self.take([Content("")], None)
        return told + self.end(status=status)

    # --- inside --------------------------------------------------------------------------------------------------

    def _begin(self, kind: str, piece: Piece, told: list[bytes]) -> _Growing:
        index = len(self.items)
        item: Fields
        if isinstance(piece, CallStart):
            client = self._clients.get(piece.name, Client(piece.name))
            item = client.call(new_id("ctc" if client.is_custom else "fc"), piece.id)
            event = "custom_tool_call_input" if client.is_custom else "function_call_arguments"
            growing = _Growing(kind, item, index, f"response.{event}", {})
        elif isinstance(piece, Thinking):
            item = {"id": new_id("rs"), "type": kind, "status": "in_progress", "summary": []}
            event = "response.reasoning_summary_text" if self._summarizes else "response.reasoning_text"
            growing = _Growing(kind, item, index, event, {"summary_index" if self._summarizes else "content_index": 0})
        else:
            item = {"id": new_id("msg"), "type": kind, "status": "in_progress", "role": "assistant", "content": []}
            growing = _Growing(kind, item, index, "response.output_text", {"content_index": 0})
        growing.where = {"item_id": item["id"], "output_index": index} | growing.where
        growing.opening = self._events.opening(growing.event + ".delta", growing.where)
        self._growing = growing
        told.append(self._tell("response.output_item.added", {"output_index": index, "item": item}))
        if kind != "function_call":
            told.append(self._tell(_part_event(growing, "added"), growing.where | {"part": _part(growing)}))
        return growing

    def _grow(self, growing: _Growing, text: str) -> bytes:
        growing.texts.append(text)
        if growing.item["type"] == "custom_tool_call":
            return b""  # its text is inside of arguments, which are read when they are whole
        if growing.kind != "message":
            self._waiting_logprobs.clear()
            return self._events.more(growing.opening, b',"delta":' + encode(text))
        rest = b',"logprobs":[]'
        if self._waiting_logprobs:
            tokens = entries(self._waiting_logprobs)
            growing.logprobs += tokens
            self._waiting_logprobs.clear()
            rest = b',"logprobs":' + encode(tokens)
        return self._events.more(growing.opening, b',"delta":' + encode(text) + rest)

    def _end_text(self, growing: _Growing) -> bytes:
        """A message, or reasoning."""
        part = _part(growing)
        growing.item["summary" if "summary_index" in growing.where else "content"] = [part]
        more = {"logprobs": growing.logprobs} if growing.item["type"] == "message" else {}
        done = self._tell(growing.event + ".done", growing.where | {"text": growing.text} | more)
        return done + self._tell(_part_event(growing, "done"), growing.where | {"part": part})

    def _end_call(self, growing: _Growing) -> bytes:
        arguments = growing.text
        growing.item["arguments"] = arguments
        named = {"name": growing.item["name"], "arguments": arguments}
        return self._tell(growing.event + ".done", growing.where | named)

    def _end_custom(self, growing: _Growing) -> bytes:
        growing.item["input"] = text = input_of(growing.text)
        delta = self._events.more(growing.opening, b',"delta":' + encode(text))
        return delta + self._tell(growing.event + ".done", growing.where | {"input": text})

    def _tell(self, kind: str, fields: Fields) -> bytes:
        return self._events.event(kind, fields)


_KINDS: dict[type, str] = {Content: "message", Thinking: "reasoning"}
_ENDS = {
    "message": Output._end_text, "reasoning": Output._end_text, "function_call": Output._end_call,
    "custom_tool_call": Output._end_custom,
}  # fmt: skip


def _part(growing: _Growing) -> Fields:
    """The one part of a message or of reasoning, as far as it goes."""
    if growing.item["type"] == "message":
        return {"type": "output_text", "text": growing.text, "annotations": [], "logprobs": list(growing.logprobs)}
    return {"type": "summary_text" if "summary_index" in growing.where else "reasoning_text", "text": growing.text}


def _part_event(growing: _Growing, what: str) -> str:
    is_summary = "summary_index" in growing.where
    return f"response.{'reasoning_summary_part' if is_summary else 'content_part'}.{what}"
