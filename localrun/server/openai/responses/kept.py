"""The responses that are kept: what `previous_response_id`, item references and GET find.

In the daemon's memory, in its event loop; gone when it ends. Of each owner at most `MAX_RESPONSES` and `MAX_BYTES` are
kept, and the one that was not asked for longest goes first; nobody's go for another's, and what would be more than
`MAX_BYTES_OF_ALL` is not kept. Every kept response holds its whole conversation, so that the going of an older
one never breaks a newer one.

Does not: run a response, or write to disk: conversations are private, and the client has them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from localrun.errors import NotFound

Fields = dict[str, Any]

MAX_RESPONSES = 1000
MAX_BYTES = 64 * 1024 * 1024
MAX_BYTES_OF_ALL = 512 * 1024 * 1024


class Kept(msgspec.Struct, frozen=True):
    """`input` are all items before the answer, those of earlier responses included."""

    response: Fields
    input: tuple[Fields, ...]
    size_bytes: int

    @property
    def conversation(self) -> tuple[Fields, ...]:
        """What a response that follows begins with."""
        return (*self.input, *self.response["output"])

    def named(self) -> Iterator[tuple[str, Fields]]:
        """The items of the conversation that have an id, with it."""
        for item in self.conversation:
            if isinstance(item_id := item.get("id"), str):
                yield item_id, item


def _size_bytes(kept: object) -> int:
    """About what it takes in memory: an empty list is two bytes as JSON, and sixty as an object."""
    encoded = msgspec.json.encode(kept)
    return len(encoded) + 64 * sum(encoded.count(each) for each in (b",", b"[", b"{"))


class KeptResponses:
    def __init__(
        self,
        *,
        max_responses: int = MAX_RESPONSES,
        max_bytes: int = MAX_BYTES,
        max_bytes_of_all: int = MAX_BYTES_OF_ALL,
    ) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._max_bytes_of_all = max_bytes_of_all
        self._kept: dict[bytes, OrderedDict[str, Kept]] = {}
        self._size_bytes: Counter[bytes] = Counter()
        # By its id: an item of each response that has it, the newest last.
        self._items: dict[tuple[bytes, str], dict[str, Fields]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))

    def add(self, response: Fields, input_: Sequence[Fields], owner: bytes = b"") -> None:
        """Keeps a finished response for `owner`, the namespace of whoever asked; older ones may go for it, and one that
        is too large is not kept."""
        kept = Kept(response, tuple(input_), _size_bytes(response) + _size_bytes(input_))
        own = self._kept.setdefault(owner, OrderedDict())
        own[response["id"]] = kept
        self._size_bytes[owner] += kept.size_bytes
        for item_id, item in kept.named():
            self._items.setdefault((owner, item_id), {})[response["id"]] = item
        while own and (
            len(own) > self._max_responses
            or self._size_bytes[owner] > self._max_bytes
            or self._size_bytes.total() > self._max_bytes_of_all
        ):
            self._forget(next(iter(own)), owner)

    def get(self, response_id: str, owner: bytes = b"", *, field: str | None = None) -> Kept:
        """Raises NotFound, naming `field`."""
        own = self._kept.get(owner, OrderedDict())
        if response_id not in own:
            raise NotFound(
                f"response '{response_id[:80]}' is not kept here: the last {self._max_responses} are, while the daemon "
                f"runs, unless store was false; send the whole conversation as input",
                field=field,
            )
        own.move_to_end(response_id)
        return own[response_id]

    def delete(self, response_id: str, owner: bytes = b"") -> None:
        """Raises NotFound."""
        self.get(response_id, owner)
        self._forget(response_id, owner)

    def item(self, item_id: str, owner: bytes = b"") -> Fields | None:
        """An item of a kept conversation, of the newest that has it."""
        having = self._items.get((owner, item_id))
        return None if having is None else next(reversed(having.values()))

    def _forget(self, response_id: str, owner: bytes) -> None:
        own = self._kept[owner]
        kept = own.pop(response_id)
        self._size_bytes[owner] -= kept.size_bytes
        if not own:
            del self._kept[owner], self._size_bytes[owner]
        for item_id, _ in kept.named():
            having = self._items.get((owner, item_id), {})
            having.pop(response_id, None)
            if not having:
                self._items.pop((owner, item_id), None)
