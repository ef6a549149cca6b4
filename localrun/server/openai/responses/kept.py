"""The responses that are kept: what `previous_response_id`, item references and GET find.

In the daemon's memory, in its event loop; gone when it ends. At most `MAX_RESPONSES` and `MAX_BYTES` are kept, and who
was not asked for longest goes first. Every kept response holds its whole conversation, so that the going of an older
one never breaks a newer one.

Does not: run a response, or write to disk: conversations are private, and the client has them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import msgspec

from localrun.errors import NotFound
from localrun.server.openai.answer import Fields, encode
from localrun.server.openai.responses.items import Item

MAX_RESPONSES = 1000
MAX_BYTES = 64 * 1024 * 1024


class Kept(msgspec.Struct, frozen=True):
    """`input` are all items before the answer, those of earlier responses included. `owner` is the namespace of whoever
    asked, and nobody else finds it."""

    response: Fields
    input: tuple[Item, ...]
    size_bytes: int
    owner: bytes

    @property
    def conversation(self) -> tuple[Item, ...]:
        """What a response that follows begins with."""
        return (*self.input, *self.response["output"])

    def named(self) -> Iterator[tuple[str, Item]]:
        """The items of the conversation that have an id, with it."""
        for item in self.conversation:
            if isinstance(item_id := item.get("id"), str):
                yield item_id, item


class KeptResponses:
    """See the module."""

    def __init__(self, *, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._size_bytes = 0
        # By its id: an item of each response that has it, the newest last.
        self._items: dict[tuple[bytes, str], dict[str, Item]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, response: Fields, input_: Sequence[Item], owner: bytes = b"") -> None:
        """Keeps a finished response; older ones may go for it, and one that is too large is not kept."""
        kept = Kept(response, tuple(input_), len(encode(response)) + len(encode(input_)), owner)
        self._kept[response["id"]] = kept
        self._size_bytes += kept.size_bytes
        for item_id, item in kept.named():
            self._items.setdefault((owner, item_id), {})[response["id"]] = item
        while len(self._kept) > self._max_responses or self._size_bytes > self._max_bytes:
            self._forget(next(iter(self._kept)))

    def get(self, response_id: str, owner: bytes = b"", *, field: str | None = None) -> Kept:
        """Raises NotFound, naming `field`."""
        kept = self._kept.get(response_id)
        if kept is None or kept.owner != owner:
            raise NotFound(
                f"response '{response_id[:80]}' is not kept here: the last {self._max_responses} are, while the daemon "
                f"runs, unless store was false; send the whole conversation as input",
                field=field,
            )
        self._kept.move_to_end(response_id)
        return kept

    def delete(self, response_id: str, owner: bytes = b"") -> None:
        """Raises NotFound."""
        self.get(response_id, owner)
        self._forget(response_id)

    def item(self, item_id: str, owner: bytes = b"") -> Item | None:
        """An item of a kept conversation, of the newest that has it."""
        having = self._items.get((owner, item_id))
        return None if having is None else next(reversed(having.values()))

    def _forget(self, response_id: str) -> None:
        kept = self._kept.pop(response_id)
        self._size_bytes -= kept.size_bytes
        for item_id, _ in kept.named():
            having = self._items.get((kept.owner, item_id), {})
            having.pop(response_id, None)
            if not having:
                self._items.pop((kept.owner, item_id), None)
