"""Texts on their way to tokens, in threads beside the reader and the steps.

A megabyte takes half a second. So the reader only hands texts over and reads on, and a cancel overtakes them (`drop`).
One thread reads long texts and another one short texts, which therefore wait for no long one but those of their own
client: the texts of a client are read one after another, in the order in which they came.

Owner: any thread may call. Native tokenizers release the interpreter lock, and only read the vocabulary.
Invariant: `deliver` is called once for every text that was put, unless `drop` or `close` came before.
Does not: know models or messages.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from localrun.errors import QueueFull

# Some 15 ms of a native tokenizer.
LONG_CHARACTERS = 1 << 15

T = TypeVar("T")


@dataclass(eq=False)
class Text(Generic[T]):
    """`read` makes of it what `deliver` is then given. Texts of the same `client` are delivered in order."""

    id: int
    client: Hashable
    n_characters: int
    read: Callable[[], T]
    deliver: Callable[[T], None]
    is_under_way: bool = False
    is_dropped: bool = False


class Tokenizing:
    """See the module. No more than `max_texts` wait or are under way."""

    def __init__(self, *, max_texts: int) -> None:
        self._max_texts = max_texts
        self._changed = threading.Condition()
        # Of each client, whose turn it is first. A text stays in its queue until it was read.
        self._queues: dict[Hashable, deque[Text[Any]]] = {}
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._serve, args=(is_long,), name=name, daemon=True)
            for is_long, name in ((False, "short texts"), (True, "long texts"))
        ]
        for thread in self._threads:
            thread.start()

    def put(self, text: Text[T]) -> None:
        """A new text, to be read after those of its client. Raises QueueFull."""
        with self._changed:
            n_texts = sum(map(len, self._queues.values()))
            if n_texts >= self._max_texts:
                raise QueueFull(f"{n_texts} prompts wait to be tokenized; ask later", retry_after_s=1.0)
            self._queues.setdefault(text.client, deque()).append(text)
            self._changed.notify_all()

    def drop(self, text_id: int) -> bool:
        """Forget a text. False if it was delivered already, or never put."""
        with self._changed:
            text = next((text for text in self._texts() if text.id == text_id and not text.is_dropped), None)
            if text is None:
                return False
            text.is_dropped = True
            if not text.is_under_way:
                self._remove(text)
            return True

    def close(self, timeout_s: float) -> bool:
        """Deliver nothing more. Whether the threads ended within `timeout_s`, so that the vocabulary may be freed."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout_s / len(self._threads))
        return not any(thread.is_alive() for thread in self._threads)

    def _serve(self, is_long: bool) -> None:
        """A thread."""
        while (text := self._take(is_long)) is not None:
            result = text.read()
            with self._changed:
                self._remove(text)
                if not text.is_dropped and not self._is_closed:
                    text.deliver(result)

    def _take(self, is_long: bool) -> Text[Any] | None:
        """The next text of a length, waited for; None at the end."""
        with self._changed:
            while not self._is_closed:
                for queue in self._queues.values():
                    text = queue[0]
                    if not text.is_under_way and (text.n_characters >= LONG_CHARACTERS) == is_long:
                        text.is_under_way = True
                        return text
                self._changed.wait()
            return None

    def _remove(self, text: Text[Any]) -> None:
        """It is over. What its client has besides goes behind the others."""
        queue = self._queues.pop(text.client)
        queue.remove(text)
        if queue:
            self._queues[text.client] = queue
        self._changed.notify_all()

    def _texts(self) -> Iterator[Text[Any]]:
        return (text for queue in self._queues.values() for text in queue)
