"""The chunks of `/v1/completions`: text as the model wrote it.

Does not: send.
"""

from __future__ import annotations

from collections.abc import Sequence

from localrun.server.openai.chunks import Chunks, Fields, piece_text
from localrun.wire import ChosenLogprob, Delta


class CompletionChunks(Chunks):
    """See the module. `echoes` are the prompts to put before the choices' text, by index; empty for none."""

    id_prefix = "cmpl-"
    stream_object = "text_completion"
    whole_object = "text_completion"
    before_text = b'"text":'
    after_text = b""
    no_text = b'"text":""'

    def __init__(
        self,
        *,
        request_id: str,
        model: str,
        include_usage: bool,
        echoes: Sequence[str] = (),
        shows_logprobs: bool = True,
    ) -> None:
        super().__init__(request_id=request_id, model=model, include_usage=include_usage)
        self._echoes = echoes
        self._shows_logprobs = shows_logprobs
        self._offsets: dict[int, int] = {}
        self._texts: dict[int, list[str]] = {}
        self._kept: dict[int, list[ChosenLogprob]] = {}

    def first(self, index: int) -> bytes:
        return self.text(index, self._echoes[index]) if self._echoes else b""

    def news(self, index: int, delta: Delta) -> bytes:
        return self.text(index, delta.text, delta.logprobs) if delta.text or delta.logprobs else b""

    def gather(self, index: int, delta: Delta) -> None:
        self._texts.setdefault(index, []).append(delta.text)
        self._kept.setdefault(index, []).extend(delta.logprobs or ())

    def choice(self, index: int, reason: str) -> Fields:
        echoed = self._echoes[index] if self._echoes else ""
        logprobs = self._kept.get(index) if self._shows_logprobs else None
        return {
            "index": index,
            "text": echoed + "".join(self._texts.get(index, ())),
            "logprobs": self.logprobs(index, logprobs) if logprobs else None,
            "finish_reason": reason,
        }

    def score(self, index: int) -> float:
        """How probable a gathered choice was to the model: the mean over its tokens, by which `best_of` chooses."""
        kept = self._kept.get(index, ())
        return sum(chosen.logprob for chosen in kept) / len(kept) if kept else 0.0

    def logprobs(self, index: int, logprobs: Sequence[ChosenLogprob]) -> Fields:
        """`text_offset` counts characters from the start of the choice's text."""
        offset = self._offsets.get(index, 0)
        offsets: list[int] = []
        for chosen in logprobs:
            offsets.append(offset)
            offset += len(piece_text(chosen.piece))
        self._offsets[index] = offset
        return {
            "tokens": [piece_text(chosen.piece) for chosen in logprobs],
            "token_logprobs": [chosen.logprob for chosen in logprobs],
            "top_logprobs": [{piece_text(other.piece): other.logprob for other in chosen.top} for chosen in logprobs],
            "text_offset": offsets,
        }
