"""One reply as it comes: the parser of its text, and what it said so far.

Runs in the task of the request. `take` gives the pieces of a delta, for who streams them on; `gathered` is their sum,
for who sends it whole.

Does not: know an API's form.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from localrun.server.replies.pieces import CallArguments, CallStart, Content, Piece, ReplyParser, Thinking
from localrun.wire import ChosenLogprob, Delta


@dataclass
class Call:
    """A tool call. `arguments` are parts of the text of one JSON object."""

    id: str
    name: str
    arguments: list[str] = field(default_factory=list)

    @property
    def arguments_text(self) -> str:
        return "".join(self.arguments)


@dataclass
class Gathered:
    """What a reply said. `logprobs` are of all its tokens, those of its thinking and calls included."""

    content: list[str] = field(default_factory=list)
    thinking: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    logprobs: list[ChosenLogprob] = field(default_factory=list)

    @property
    def content_text(self) -> str:
        return "".join(self.content)

    @property
    def thinking_text(self) -> str:
        return "".join(self.thinking)


class Reply:
    """See the module. `n_thinking` counts the tokens that came with thinking; one that ends it counts too."""

    def __init__(self, parser: ReplyParser) -> None:
        self.n_thinking = 0
        self.has_calls = False
        self.gathered = Gathered()
        self._parser = parser
        self._is_thinking = False

    def take(self, delta: Delta) -> list[Piece]:
        """The pieces that a delta makes certain; after the final one nothing is held back."""
        pieces = self._parser.feed(delta.text) if delta.text else []
        if delta.finish is not None:
            pieces += self._parser.finish()
        for piece in pieces:
            self._is_thinking = isinstance(piece, Thinking)
            if isinstance(piece, CallStart):
                self.has_calls = True
        if self._is_thinking:
            self.n_thinking += len(delta.tokens)
        return pieces

    def gather(self, delta: Delta) -> None:
        """Takes a delta in, and keeps what it said."""
        self.gathered.logprobs += delta.logprobs or ()
        for piece in self.take(delta):
            self._keep(piece)

    def _keep(self, piece: Piece) -> None:
        gathered = self.gathered
        if isinstance(piece, Content):
            gathered.content.append(piece.text)
        elif isinstance(piece, Thinking):
            gathered.thinking.append(piece.text)
        elif isinstance(piece, CallStart):
            gathered.calls.append(Call(piece.id, piece.name))
        elif isinstance(piece, CallArguments):
            gathered.calls[piece.index].arguments.append(piece.text)
