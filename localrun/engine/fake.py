"""A deterministic backend without weights: the next token is a hash of the prefix that the sequence really sees.

It keeps cells of its own, places, shares and saves them as llama.cpp does, one cell at a time, and refuses what
llama.cpp would abort on. The hash runs over the tokens found in the cells that are visible to a row, so any mix-up of
sequences, a stale cell, a hole or a wrong position changes the output, and a property test sees it.

Vocabulary: 256 bytes, then `<|im_start|>`, `<|im_end|>` (ends a generation). Generated tokens are lower-case letters,
spaces and the two bytes of "é", so that text, partial characters and ends all occur.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, field
from zlib import crc32

import msgspec

from localrun.engine.backend import Batch, DecodeFailed, NoRoom
from localrun.wire import Sampling, TokenLogprob

IM_START, IM_END = 256, 257
CONTROL = {"<|im_start|>": IM_START, "<|im_end|>": IM_END}
_CONTROL_TEXT = re.compile("|".join(map(re.escape, CONTROL)))
_LETTERS = b"abcdefghijklmnopqrstuvwxyz      "
_LEAD, _TAIL = "é".encode()
_END_ONE_IN = 97


@dataclass
class _Cell:
    pos: int
    token: int
    digest: int
    seqs: set[int] = field(default_factory=set)


class FakeSampler:
    """Greedy unless a seed and a temperature are given; then the seed is mixed into the hash."""

    def __init__(self, backend: FakeBackend, sampling: Sampling, *, ignore_eos: bool) -> None:
        self._backend = backend
        self._salt = 0 if sampling.temperature <= 0 or sampling.seed is None else sampling.seed
        self._ignore_eos = ignore_eos
        self.is_closed = False
        backend.n_open_samplers += 1

    def accept(self, tokens: list[int]) -> None:
        pass

    def sample(self, row: int) -> int:
        return next_token(self._backend.digests[row] ^ self._salt, ignore_eos=self._ignore_eos)

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._backend.n_open_samplers -= 1


class FakeBackend:
    """See the module and `backend.Backend`."""

    name = "fake"
    n_vocab = 258
    n_threads = 1
    n_gpu_layers = 0
    model_size_bytes = 0
    eog_tokens = frozenset({IM_END})
    control_tokens = tuple(CONTROL)
    bos_token: int | None = None

    def __init__(self, *, n_cells: int, n_seqs: int, n_batch: int, n_ctx_train: int = 1 << 20) -> None:
        self.n_cells = n_cells
        self.n_seqs = n_seqs
        self.n_ctx_train = n_ctx_train
        self.n_ctx = min(n_cells, n_ctx_train)
        self.batch = Batch(n_batch)
        self.digests: dict[int, int] = {}
        self.n_open_samplers = 0
        self.n_rows_computed = 0
        self.n_used = 0
        self._cells: list[_Cell | None] = [None] * n_cells
        self._head = 0
        self._at: list[dict[int, int]] = [{} for _ in range(n_seqs)]
        self._step_s = float(os.environ.get("LOCALRUN_FAKE_STEP_MS", "0")) / 1000

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        tokens: list[int] = []
        at = 0
        for found in _CONTROL_TEXT.finditer(text) if parse_special else ():
            tokens += text[at : found.start()].encode("utf-8", "replace")
            tokens.append(CONTROL[found.group()])
            at = found.end()
        return tokens + list(text[at:].encode("utf-8", "replace"))

    def piece(self, token: int) -> bytes:
        if not 0 <= token < self.n_vocab:
            raise ValueError(f"token {token} is not in the vocabulary")
        return bytes([token]) if token < 256 else b""

    def decode(self, n_rows: int) -> None:
        if not 0 < n_rows <= self.batch.capacity:
            raise ValueError(f"{n_rows} rows in a batch of {self.batch.capacity}")
        if self._step_s:
            time.sleep(self._step_s)
        free = self._find(n_rows)
        if free is None:
            raise NoRoom(f"{n_rows} rows, {self.n_cells - self.n_used} free cells")
        batch = self.batch
        self.digests = {}
        for row in range(n_rows):
            seq, pos, token = int(batch.seq[row]), int(batch.pos[row]), int(batch.token[row])
            self._check_seq(seq)
            if pos != len(self._at[seq]):
                raise DecodeFailed(f"position {pos} of sequence {seq} is not the next one", is_fatal=False)
            digest = _digest(self._visible(seq, pos), token)
            self._cells[free[row]] = _Cell(pos, token, digest, {seq})
            self._at[seq][pos] = free[row]
            if batch.wants_logits[row]:
                self.digests[row] = digest
        self._occupy(free)
        self.n_rows_computed += n_rows

    def sampler(self, sampling: Sampling, *, ignore_eos: bool) -> FakeSampler:
        return FakeSampler(self, sampling, ignore_eos=ignore_eos)

    def logprobs(self, row: int, token: int, n_top: int) -> tuple[float, tuple[TokenLogprob, ...]]:
        best = [(token + step) % 256 for step in range(n_top)]
        return -0.25, tuple(TokenLogprob(other, self.piece(other), -0.25 - rank) for rank, other in enumerate(best))

    def seq_share(self, source: int, target: int, start: int, end: int) -> None:
        self._check_seq(source)
        self._check_seq(target)
        for pos in range(start, end):
            index = self._at[source][pos]
            assert pos not in self._at[target], f"position {pos} of sequence {target} would be there twice"
            cell = self._cells[index]
            assert cell is not None
            cell.seqs.add(target)
            self._at[target][pos] = index

    def seq_remove(self, seq: int, start: int, end: int = -1) -> bool:
        self._check_seq(seq)
        for pos in [pos for pos in self._at[seq] if pos >= start and (end < 0 or pos < end)]:
            index = self._at[seq].pop(pos)
            cell = self._cells[index]
            assert cell is not None
            cell.seqs.discard(seq)
            if not cell.seqs:
                self._cells[index] = None
                self._head = min(self._head, index)
                self.n_used -= 1
        return True

    def state_get(self, seq: int, *, limit_bytes: int) -> bytearray | None:
        saved = [(cell.pos, cell.token) for cell in self._cells if cell is not None and seq in cell.seqs]
        state = bytearray(msgspec.msgpack.encode(saved))
        return state if len(state) <= limit_bytes else None

    def state_set(self, seq: int, state: bytearray) -> bool:
        self.seq_remove(seq, 0)
        saved = msgspec.msgpack.decode(state, type=list[tuple[int, int]])
        free = self._find(len(saved))
        if free is None:
            return False
        self._occupy(free)
        digest = 0
        for pos, token, index in sorted((*entry, index) for entry, index in zip(saved, free, strict=True)):
            digest = _digest(digest, token)
            self._cells[index] = _Cell(pos, token, digest, {seq})
            self._at[seq][pos] = index
        return True

    def close(self) -> None:
        pass

    def tokens_of(self, seq: int) -> list[int]:
        """What a sequence's cells hold, in order of position: for tests to compare with the books."""
        cells = [self._cells[self._at[seq][pos]] for pos in sorted(self._at[seq])]
        return [cell.token for cell in cells if cell is not None]

    def cells_of(self, seq: int) -> list[int]:
        """Where a sequence lies, in order of position."""
        return [self._at[seq][pos] for pos in sorted(self._at[seq])]

    def _find(self, count: int) -> list[int] | None:
        """Free cells for `count` tokens, one by one from the head on and once round; None if there are too few."""
        at = 0 if self._head > self.n_used + 2 * count else self._head
        found: list[int] = []
        for _ in range(self.n_cells):
            at %= self.n_cells
            if self._cells[at] is None:
                found.append(at)
                if len(found) == count:
                    return found
            at += 1
        return None

    def _occupy(self, cells: list[int]) -> None:
        self._head = cells[-1] + 1
        self.n_used += len(cells)

    def _visible(self, seq: int, pos: int) -> int:
        """The digest of everything before `pos` that `seq` sees."""
        if pos == 0:
            return 0
        cell = self._cells[self._at[seq][pos - 1]]
        assert cell is not None
        assert seq in cell.seqs, f"sequence {seq} points at a cell that it does not hold"
        assert cell.pos == pos - 1, f"a cell of sequence {seq} stands at another position"
        return cell.digest

    def _check_seq(self, seq: int) -> None:
        if not 0 <= seq < self.n_seqs:
            raise ValueError(f"sequence {seq} is not below {self.n_seqs}")


def next_token(digest: int, *, ignore_eos: bool = False) -> int:
    """The token that follows a prefix with this digest."""
    mixed = (digest * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & (2**64 - 1)
    if not ignore_eos and mixed >> 40 & 0xFFFF and (mixed >> 40) % _END_ONE_IN == 0:
        return IM_END
    pick = (mixed >> 20) % (len(_LETTERS) + 2)
    return _LETTERS[pick] if pick < len(_LETTERS) else (_LEAD, _TAIL)[pick - len(_LETTERS)]


def _digest(before: int, token: int) -> int:
    return crc32(token.to_bytes(4, "little"), before)
