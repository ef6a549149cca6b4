"""An engine on a real model, asked for greedy answers: in one process, as `engine/process.py` puts it together.

Nothing is drafted unless a `draft` is given, so that a token is a row. After every step the engine's books are checked
against each other. Does not: judge the answers (`verdict.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from localrun.engine.cache.disk import open_disk
from localrun.engine.cache.disk_files import library_build
from localrun.engine.engine import Limits
from localrun.engine.native.library import library_folder, native
from localrun.engine.native.llama import LlamaBackend
from localrun.engine.request import Request
from localrun.engine.speculate.choice import DraftChoice
from localrun.engine.speculate.speculation import Speculation
from localrun.wire import Delta, DraftSource, Finish, Open, Sampling, Submit, Usage
from tests.engine.speculate.drafters import always
from tests.engine.stepped import SteppedEngine

GREEDY = Sampling(temperature=0)
RAM_CACHE_BYTES = 1 << 29


class Given:
    """A drafter that knows answers, or is `wrong` throughout: each token is the one after the answer's in the
    vocabulary. `n_most` tokens are drafted and verified in every step.

    `n_on_course`: tokens drafted while a text was still the one that is known. Once rounding has parted them, what is
    known says no more about what comes."""

    source = DraftSource.DRAFT_MODEL

    def __init__(self, prompts: list[list[int]], answers: list[list[int]], n_most: int, *, wrong: bool = False) -> None:
        self.n_most = n_most
        self._known = [(len(prompt), prompt + answer) for prompt, answer in zip(prompts, answers, strict=True)]
        self._wrong = wrong
        self.n_on_course = 0

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[list[int]]:
        return [self._next(request, n_wanted) for request, n_wanted in wanted]

    def _next(self, request: Request, n_wanted: int) -> list[int]:
        n_prompt, n_tokens = request.n_prompt, request.n_tokens
        prompt = request.tokens[:n_prompt]
        whole = next(known for length, known in self._known if length == n_prompt and known[:length] == prompt)
        tokens = whole[n_tokens : n_tokens + n_wanted]
        if request.tokens[:n_tokens] == whole[:n_tokens]:
            self.n_on_course += len(tokens)
        return [token + 1 if self._wrong and token else token for token in tokens]

    def decoded(self, n_rows: int) -> None:
        """It computes nothing."""

    def drop(self, request: Request) -> None:
        """It keeps nothing."""

    def close(self) -> None:
        """It has nothing."""

    def choose(self, streams: Sequence[object], *_: object) -> DraftChoice:
        """As many rows for every stream, whatever they gain."""
        return DraftChoice((self.n_most,) * len(streams), 1.0, float(len(streams)))


class Runner:
    """`usages` by request, in the order of asking. `n_rows`: of every batch that the last call computed, in order. With
    `kv_folder` prefixes are kept there on disk. `had_long_ones`: some were longer than a stream."""

    def __init__(
        self,
        path: Path,
        *,
        n_threads: int,
        n_cells: int = 8192,
        n_slots: int = 8,
        split: bool = True,
        kv_type: str = "f16",
        kv_folder: Path | None = None,
        ram_cache_bytes: int = RAM_CACHE_BYTES,
        draft: Given | None = None,
    ) -> None:
        opened = Open(
            model_path=str(path), n_slots=n_slots, n_kv_cells=n_cells, n_batch=512, n_threads=n_threads,
            n_gpu_layers=0, kv_type=kv_type, target_itl_s=0.14, ram_cache_bytes=ram_cache_bytes, max_queue=256,
            model=path.stem, disk_cache_bytes=(1 << 32) if kv_folder else 0, kv_folder=str(kv_folder or ""),
        )  # fmt: skip
        self.backend = LlamaBackend(
            opened.model_path, n_cells=n_cells, n_seqs=n_slots, n_spare_seqs=64, n_batch=512, n_threads=n_threads,
            n_gpu_layers=0, kv_type=kv_type, may_split=split,
        )  # fmt: skip
        disk = open_disk(opened, self.backend, lambda: library_build("llama-cpp-python", library_folder()))
        assert (disk is not None) == (kv_folder is not None)
        limits = Limits(n_slots, opened.max_queue, opened.target_itl_s, ram_cache_bytes)
        speculation = Speculation(self.backend, time.monotonic, is_on=False)
        if draft is not None:
            speculation = Speculation(
                self.backend, time.monotonic, drafter_of=lambda request: draft, policy=always(draft.choose)
            )
        self.engine = SteppedEngine(self.backend, limits, time.monotonic, disk, speculation=speculation)
        self.usages: dict[int, Usage] = {}
        self.n_rows: list[int] = []
        self.had_long_ones = False
        self._n_asked = 0

    def ask(self, *prompts: list[int], n_tokens: int = 48) -> list[list[int]]:
        """What follows each prompt; they are submitted at once."""
        return [
            [token for delta in deltas for token in delta.tokens] for deltas in self._ask(prompts, n_tokens, GREEDY)
        ]

    def ask_one_by_one(self, prompts: list[list[int]], *, n_tokens: int = 48) -> list[list[int]]:
        """Each prompt when the one before has ended, and what is kept of it was put away."""
        return [self.ask(prompt, n_tokens=n_tokens)[0] for prompt in prompts]

    def logprob(self, prompt: list[int], token: int) -> float:
        """The log-probability of one token after a prompt: the request's only choice is that token."""
        forced = Sampling(temperature=0, logit_bias=((token, 1e6),))
        (deltas,) = self._ask((prompt,), 1, forced)
        (chosen,) = [logprob for delta in deltas for logprob in delta.logprobs or ()]
        assert chosen.token == token
        return chosen.logprob

    def forget(self) -> None:
        """Nothing that was computed before is used again."""
        self.engine.clear_cache(ram=True, disk=True)

    @property
    def n_cached(self) -> list[int]:
        """The cached tokens of each request so far."""
        return [self.usages[request].n_cached for request in sorted(self.usages)]

    def close(self) -> None:
        """As at the end of a process: what was computed is written to disk."""
        self.engine.close()
        self.engine.cache.tiers.flush(60.0, time.monotonic)
        self.backend.close()

    def _ask(self, prompts: tuple[list[int], ...], n_tokens: int, sampling: Sampling) -> list[list[Delta]]:
        first, self._n_asked = self._n_asked, self._n_asked + len(prompts)
        found: dict[int, list[Delta]] = {}
        for request, prompt in enumerate(prompts, first):
            found[request] = []
            submit = Submit(
                id=request, sampling=sampling, n_predict=n_tokens, ignore_eos=sampling is GREEDY,
                logprobs=sampling is not GREEDY,
            )  # fmt: skip
            self.engine.submit(submit, list(prompt))
        with pytest.MonkeyPatch.context() as patch:
            self.n_rows = []
            patch.setattr(native, "llama_decode", _counting(native.llama_decode, self.n_rows))
            self._run(found)
        return list(found.values())

    def _run(self, found: dict[int, list[Delta]]) -> None:
        while not self.engine.is_idle:
            step = self.engine.step()
            self.engine.cache.check_integrity()
            self.had_long_ones |= any(request.is_long for request in self.engine.scheduler.running)
            for delta in step.deltas if step else ():
                found[delta.id].append(delta)
                if delta.finish is not None:
                    assert delta.finish is Finish.LENGTH, delta.error_message
                    assert delta.usage is not None
                    self.usages[delta.id] = delta.usage


def _counting(decode: Callable[..., int], n_rows: list[int]) -> Callable[..., int]:
    def counted(context: Any, batch: Any) -> int:
        n_rows.append(batch.n_tokens)
        return decode(context, batch)

    return counted
