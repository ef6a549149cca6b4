"""One request's native sampler chain: a `backend.Sampler` over llama.cpp.

Owner: the engine's main thread. Does not: decide which stages there are (`chain.py`), or count tokens
(`chain.py`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localrun.engine.backend import Sampler
from localrun.engine.native.context import DEVICE_TOP_K, are_numbers
from localrun.engine.native.library import native
from localrun.engine.sample import chain as stages
from localrun.engine.sample.chain import Adjustments, MirostatDraws, Nucleus, bits_at, fraction, native_seed
from localrun.engine.sample.constraint import DEAD_END, UNKNOWN, Constraint

# llama_token_data
_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


class LlamaSampler:
    """A native sampler chain, where one begins with top-k or locally typical tokens, or has a stage that is llama.cpp's
    alone (DRY, top-n-sigma, XTC, a dynamic temperature). In its place there is an argmax where the chain would be
    nothing else, and what `chain.py` has for the others.

    The native stages that draw are made anew for every token, with seeds of its own (5 us): then what is drawn for a
    token depends on its position alone (`chain.py`). DRY is told of every token, as `Adjustments` is.

    `draw` applies a native chain to a row of the last decode, or finds the likeliest token without one; `logits` gives
    the row as a view of native memory. Tokens in `banned` are never chosen, nor what a constraint does not allow.
    `new_dry` makes a DRY stage.
    """

    def __init__(
        self,
        draw: Callable[[Any | None, int], int],
        logits: Callable[[int], NDArray[np.float32]],
        chain: Sequence[stages.Stage],
        *,
        banned: NDArray[np.int64],
        n_vocab: int,
        new_dry: Callable[[stages.Dry], Any],
    ) -> None:
        self._draw = draw
        self._logits = logits
        self._adjustments = Adjustments(chain, banned)
        self._banned = banned
        self._n_vocab = n_vocab
        self._constraint: Constraint | None = None
        self._candidates: NDArray[np.void] | None = None
        self._unbanned: NDArray[np.int64] | None = None
        self._chain: Any = None
        native_stages = [stage for stage in chain if not isinstance(stage, stages.LogitBias | stages.Penalties)]
        self._is_adjusted = len(native_stages) < len(chain) or bool(banned.size)
        first, last = native_stages[0], native_stages[-1]
        self.is_greedy = self._takes_best = isinstance(last, stages.Greedy)
        self._seed = last.seed if isinstance(last, stages.Draw | stages.Mirostat) else 0
        self._n_seen = self._bits = self._n_draws = 0
        self._mirostat: MirostatDraws | None = None
        self._draws: MirostatDraws | Nucleus | None = None  # in the place of a chain
        if isinstance(last, stages.Mirostat):
            self._draws = self._mirostat = MirostatDraws(
                last.version, tau=last.tau, eta=last.eta, temperature=last.temperature, n_vocab=n_vocab
            )
        elif isinstance(last, stages.Draw) and not _needs_chain(native_stages):
            self._draws = _nucleus(native_stages)
        elif not self.is_greedy:
            self._chain = native.llama_sampler_chain_init(native.llama_sampler_chain_default_params())
            for stage in native_stages:
                made = new_dry(stage) if isinstance(stage, stages.Dry) else _native_stage(stage, n_vocab)
                native.llama_sampler_chain_add(self._chain, made)
        # From the first stage that draws on.
        at = next((at for at, stage in enumerate(native_stages) if isinstance(stage, stages.Xtc)), -1)
        self._drawing = native_stages[at:]
        self._at_drawing = len(native_stages) - len(self._drawing)
        self._dry = first if isinstance(first, stages.Dry) else None
        self._cuts_first = isinstance(first, stages.TopK) and first.k <= DEVICE_TOP_K

    @property
    def needs_all_logits(self) -> bool:
        """Whether the likeliest `DEVICE_TOP_K` tokens are not enough to sample from, to the last bit."""
        return self._is_adjusted or self._constraint is not None or not (self.is_greedy or self._cuts_first)

    @property
    def mu(self) -> float | None:
        return None if self._mirostat is None else self._mirostat.mu

    def constrain(self, constraint: Constraint) -> None:
        self._constraint, self.is_greedy = constraint, False

    def accept(self, tokens: list[int], mu: float | None = None) -> None:
        self._adjustments.accept(tokens)
        self._n_seen += len(tokens)
        if self._dry is not None:
            self._tell_dry(tokens[-self._dry.last_n :])
        if self._mirostat is not None and mu is not None:
            self._mirostat.mu = mu

    def sample(self, row: int) -> int:
        if self._constraint is None:
            return self._sample_free(row)
        return self._sample_constrained(self._logits(row))

    def hold(self, row: int) -> Callable[[], int]:
        return partial(self._sample_constrained, self._logits(row).copy())

    def _sample_constrained(self, logits: NDArray[np.float32]) -> int:
        assert self._constraint is not None
        if not are_numbers(logits):
            return DEAD_END
        self._begin_token()
        with self._adjustments.applied(logits):
            token = self._constraint.choose(lambda allowed: self._choose(logits, allowed), tries_first=self._takes_best)
        if token >= 0:
            self._end_token(token)
            if self._dry is not None:
                self._tell_dry((token,))
        return token

    def _sample_free(self, row: int) -> int:
        self._begin_token()
        if not self._is_adjusted:
            token = self._draw_from(row)
        else:
            # The row is changed in place, so that native stages see it too, and put back for whoever reads logprobs.
            with self._adjustments.applied(self._logits(row)):
                token = self._draw_from(row)
        if token >= 0:
            self._end_token(token)
        return token

    def _begin_token(self) -> None:
        if self._takes_best:
            return
        self._bits, self._n_draws = bits_at(self._seed, self._n_seen), 0
        if self._chain is not None:
            for at in reversed(range(self._at_drawing, self._at_drawing + len(self._drawing))):
                native.llama_sampler_free(native.llama_sampler_chain_remove(self._chain, at))
            for stage in self._drawing:
                native.llama_sampler_chain_add(self._chain, _native_stage(stage, self._n_vocab, self._bits))

    def _tell_dry(self, tokens: Sequence[int]) -> None:
        """Of tokens that the chain did not choose itself: then it knows."""
        dry = native.llama_sampler_chain_get(self._chain, 0)
        for token in tokens:
            native.llama_sampler_accept(dry, token)

    def _end_token(self, token: int) -> None:
        self._n_seen += 1
        if self._is_adjusted:
            self._adjustments.accept([token])
        if self._mirostat is not None:
            self._mirostat.accept()

    def _draw_from(self, row: int) -> int:
        if self._draws is not None:
            logits = self._logits(row)
            return self._choose(logits, None) if are_numbers(logits) else DEAD_END
        return self._draw(self._chain, row)

    def _choose(self, logits: NDArray[np.float32], allowed: NDArray[np.int64] | None) -> int:
        """A token out of `allowed` (i64[n] of ids, all if None) by `logits`, f32[n_vocab]. The chain sees no others, so
        the fewer there are the less time it takes, and is not told which one it was."""
        if self._draws is not None:
            self._n_draws += 1
            found = self._draws.draw(
                logits if allowed is None else logits[allowed], fraction(self._bits, self._n_draws)
            )
            return found if allowed is None else int(allowed[found])
        if allowed is None and (self._chain is not None or self._banned.size):
            if self._unbanned is None:
                self._unbanned = np.delete(np.arange(self._n_vocab), self._banned)
            allowed = self._unbanned
        if self._chain is None:
            return int(logits.argmax()) if allowed is None else int(allowed[logits[allowed].argmax()])
        assert allowed is not None
        if self._candidates is None:
            self._candidates = np.zeros(self._n_vocab, _CANDIDATE)
        candidates = self._candidates[: allowed.size]
        candidates["id"], candidates["logit"], candidates["p"] = allowed, logits[allowed], 0
        data = ctypes.cast(candidates.ctypes.data, ctypes.POINTER(native.llama_token_data))
        array = native.llama_token_data_array(data=data, size=allowed.size, selected=-1, sorted=False)
        native.llama_sampler_apply(self._chain, ctypes.byref(array))
        if not 0 <= array.selected < array.size <= allowed.size:
            return UNKNOWN
        token = int(array.data[array.selected].id)
        return token if 0 <= token < self._n_vocab else UNKNOWN

    def close(self) -> None:
        if self._chain is not None:
            native.llama_sampler_free(self._chain)
            self._chain = None


def _nucleus(chain: Sequence[stages.Stage]) -> Nucleus:
    top_p, min_p, temperature = 1.0, 0.0, 1.0
    for stage in chain:
        match stage:
            case stages.TopP(p):
                top_p = p
            case stages.MinP(p):
                min_p = p
            case stages.Temperature(value=value):
                temperature = value
    return Nucleus(top_p=top_p, min_p=min_p, temperature=temperature)


def _needs_chain(chain: Sequence[stages.Stage]) -> bool:
    """Whether nothing of ours does the same."""
    is_llamas = any(isinstance(stage, stages.Dry | stages.TopNSigma | stages.Xtc) for stage in chain)
    is_dynamic = any(isinstance(stage, stages.Temperature) and stage.range for stage in chain)
    return is_llamas or is_dynamic or isinstance(chain[0], stages.TopK | stages.Typical)


def _native_stage(stage: stages.Stage, n_vocab: int, bits: int = 0) -> Any:
    """`bits` are chance for the token at hand."""
    match stage:
        case stages.TopNSigma(n):
            return native.llama_sampler_init_top_n_sigma(n)
        case stages.Xtc(probability, threshold):
            return native.llama_sampler_init_xtc(probability, threshold, 1, native_seed(bits_at(bits, 1)))
        case stages.TopK(k):
            return native.llama_sampler_init_top_k(min(k, n_vocab))
        case stages.Typical(p):
            return native.llama_sampler_init_typical(p, 1)
        case stages.TopP(p):
            return native.llama_sampler_init_top_p(p, 1)
        case stages.MinP(p):
            return native.llama_sampler_init_min_p(p, 1)
        case stages.Temperature(value, spread, exponent):
            return native.llama_sampler_init_temp_ext(value, spread, exponent)
        case stages.Draw():
            return native.llama_sampler_init_dist(native_seed(bits))


# Fewer logits than this are done before a thread is awake.
LEAST_LOGITS = 200_000


class SamplingThreads:
    """Samples several rows at once, on threads where that pays.

    A native chain walks over the whole vocabulary, without the interpreter lock. Measured for 8 rows on two cores, one
    thread and two: top-k 0.30 and 0.20 ms with 49,000 tokens, 0.80 and 0.45 with 152,000. An argmax takes 0.07 ms for
    all rows, less than handing it over.

    Owner: the engine's main thread, which takes its share of the rows. Does not: know what a sampler does.

    `n_threads` counts the caller's.
    """

    def __init__(self, n_threads: int, n_vocab: int) -> None:
        self._n_others = n_threads - 1
        self._n_vocab = n_vocab
        self._pool = ThreadPoolExecutor(self._n_others, "sampling") if self._n_others else None

    def sample(self, wanted: Sequence[tuple[Sampler, int]]) -> list[int]:
        """The next token of each (sampler, row)."""
        n_slow = sum(not sampler.is_greedy for sampler, _ in wanted)
        if self._pool is None or n_slow < 2 or n_slow * self._n_vocab < LEAST_LOGITS:
            return _sample(wanted)
        n_parts = min(self._n_others + 1, len(wanted))
        parts = [wanted[part::n_parts] for part in range(n_parts)]
        others = [self._pool.submit(_sample, part) for part in parts[1:]]
        sampled = [_sample(parts[0]), *(other.result() for other in others)]
        tokens = [0] * len(wanted)
        for part, part_tokens in enumerate(sampled):
            tokens[part::n_parts] = part_tokens
        return tokens

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()


def _sample(wanted: Sequence[tuple[Sampler, int]]) -> list[int]:
    return [sampler.sample(row) for sampler, row in wanted]
