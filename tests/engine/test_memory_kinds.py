"""Models whose memory of a sequence is whole or nothing, on the real backend: the same answers, cached or not.

Batches of other sizes round differently, and random weights leave near ties, so greedy outputs are not compared token
by token: every token must be the best, within rounding, of what a plain run over the same tokens would choose from.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from localrun.engine.backend import DecodeFailed, MemoryKind
from localrun.engine.cache.copies import CHECKPOINT_GAP_TOKENS
from localrun.engine.cache.tree import PrefixKey
from localrun.engine.engine import Limits
from localrun.engine.native.library import native
from localrun.engine.native.llama import LlamaBackend
from localrun.wire import Finish, Sampling, Submit, Usage
from tests.engine.conftest import compute, n_held, saved_state
from tests.engine.stepped import SteppedEngine
from tests.support.synthesis.synthesize import synthesize

KINDS = {
    "tiny-gemma3": MemoryKind.WINDOW,
    "tiny-mamba": MemoryKind.RECURRENT,
    "tiny-qwen35": MemoryKind.HYBRID,
    "tiny-lfm2": MemoryKind.HYBRID,
}
N_WINDOW, N_BATCH, N_CELLS = 64, 64, 768
ROUNDING = 0.02
SYSTEM = "<|im_start|>system\n" + "You are a careful assistant, and you answer in full sentences. " * 4 + "<|im_end|>\n"
FIRST, SECOND = (
    f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    for text in ("Tell me about the moon and the sea, and what the one does to the other all day. " * 2,
                 "What did the old people say about the moon, and what do the young ones say of it? " * 2)
)  # fmt: skip


@pytest.fixture(scope="module", params=KINDS)
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaBackend]:
    path = tmp_path_factory.mktemp("kinds") / f"{request.param}.gguf"
    synthesize(request.param, "F16", path)
    backend = open_kind(path)
    assert backend.memory_kind is KINDS[request.param]
    yield backend
    backend.close()


def open_kind(path: Path) -> LlamaBackend:
    return LlamaBackend(
        str(path), n_cells=N_CELLS, n_seqs=4, n_spare_seqs=9, n_batch=N_BATCH, n_threads=1, n_gpu_layers=0,
        kv_type="f16",
    )  # fmt: skip


@pytest.fixture
def backend(opened: LlamaBackend) -> LlamaBackend:
    """The module's backend with every sequence empty."""
    for seq in range(opened.n_seqs):
        assert opened.seq_remove(seq, 0)
    return opened


class Run:
    """An engine on a real backend; after every step llama.cpp and the books agree about every sequence."""

    def __init__(self, backend: LlamaBackend, *, ram_cache_bytes: int = 1 << 26) -> None:
        self.backend = backend
        self.engine = SteppedEngine(backend, Limits(4, 64, 0.0, ram_cache_bytes), lambda: 0.0)
        self.outputs: dict[int, list[int]] = {}
        self.usages: dict[int, Usage] = {}
        self.prompts: dict[int, list[int]] = {}

    def ask(self, *prompts: list[int], n_predict: int = 8) -> list[int]:
        """Submit prompts at once and run until all have ended. Returns their cached tokens."""
        ids = range(len(self.prompts), len(self.prompts) + len(prompts))
        for request_id, prompt in zip(ids, prompts, strict=True):
            self.prompts[request_id] = prompt
            self.outputs[request_id] = []
            self.engine.submit(
                Submit(id=request_id, sampling=Sampling(temperature=0), n_predict=n_predict, ignore_eos=True),
                list(prompt),
            )
        while not self.engine.is_idle:
            step = self.engine.step()
            self._check()
            for delta in step.deltas if step else ():
                self.outputs[delta.id] += delta.tokens
                if delta.finish is not None:
                    assert delta.finish is Finish.LENGTH, delta.error_message
                    assert delta.usage is not None
                    self.usages[delta.id] = delta.usage
        return [self.usages[request_id].n_cached for request_id in ids]

    def _check(self) -> None:
        self.engine.cache.check_integrity()
        for seq in range(self.backend.n_seqs):
            assert n_held(self.backend, seq) == self.engine.cache.cells.length(seq)

    def assert_plain(self) -> None:
        """Every output is what a plain run over the same tokens chooses."""
        self.engine.clear_cache(ram=True, disk=False)
        self._check()
        assert self.engine.cache.cells.n_used == 0
        for request_id, output in self.outputs.items():
            logits = plain_logits(self.backend, self.prompts[request_id], output)
            for at, token in enumerate(output):
                logits[at][sorted(self.backend.eog_tokens)] = -np.inf  # the requests ignore the end
                assert logits[at][token] > logits[at].max() - ROUNDING, f"token {at} of request {request_id}"


def plain_logits(backend: LlamaBackend, prompt: list[int], output: list[int]) -> list[np.ndarray]:
    """The logits that each token of `output` is chosen from, without an engine: no cache, full batches."""
    backend.seq_remove(0, 0)
    for start in range(0, len(prompt), N_BATCH):
        logits = [compute(backend, 0, prompt[start : start + N_BATCH], start=start)]
    for at, token in enumerate(output[:-1]):
        logits.append(compute(backend, 0, [token], start=len(prompt) + at))
    backend.seq_remove(0, 0)
    return logits


def tokens_of(backend: LlamaBackend, text: str) -> list[int]:
    return backend.tokenize(text, parse_special=True)


def fill(backend: LlamaBackend, seq: int, tokens: list[int]) -> None:
    for start in range(0, len(tokens), N_BATCH):
        compute(backend, seq, tokens[start : start + N_BATCH], start=start)


# --- what llama.cpp does with such a memory ------------------------------------------------------------------------


def test_there_is_a_sequence_for_each_request_and_none_to_spare(backend: LlamaBackend):
    assert backend.n_seqs == 4


def test_no_part_of_a_sequence_can_be_shared(backend: LlamaBackend):
    fill(backend, 0, list(range(300, 340)))
    with pytest.raises(ValueError, match="share"):
        backend.seq_share(0, 1, 0, 20)


def test_a_tail_that_memory_cannot_take_off_is_refused_and_nothing_changes(backend: LlamaBackend):
    tokens = list(range(300, 500))
    fill(backend, 0, tokens)
    fill(backend, 1, list(range(800, 1200)))  # takes the cells of the other that are out of the window
    is_window = backend.memory_kind is MemoryKind.WINDOW
    oldest = native.llama_memory_seq_pos_min(native.llama_get_memory(backend.main.native), 0)
    assert oldest > 0
    assert not backend.seq_remove(0, oldest if is_window else len(tokens) - 1)
    assert n_held(backend, 0) == len(tokens)
    assert backend.seq_remove(0, len(tokens)), "nothing to remove is no problem"
    assert backend.seq_remove(0, 0)
    assert n_held(backend, 0) == 0


def test_a_saved_state_goes_on_like_the_sequence_that_it_was(backend: LlamaBackend):
    tokens = list(range(300, 500))
    fill(backend, 0, tokens)
    state = saved_state(backend, 0)
    expected = compute(backend, 0, [7], start=len(tokens))
    backend.seq_remove(0, 0)
    fill(backend, 1, [9] * 20)
    assert backend.state_set(3, state)
    np.testing.assert_allclose(compute(backend, 3, [7], start=len(tokens)), expected, atol=1e-3)


def test_a_state_is_as_large_as_what_it_remembers(backend: LlamaBackend):
    sizes = []
    for count in (40, 120, 200):
        backend.seq_remove(0, 0)
        fill(backend, 0, list(range(300, 300 + count)))
        sizes.append(len(saved_state(backend, 0)))
    if backend.memory_kind is MemoryKind.RECURRENT:
        assert sizes[0] == sizes[2]
    else:
        assert sizes[0] < sizes[1] < sizes[2]
    if backend.memory_kind is MemoryKind.WINDOW:
        assert sizes[2] - sizes[1] < (sizes[1] - sizes[0]) / 2, "beyond the window only one layer in six grows"


def test_a_damaged_state_is_refused_and_leaves_nothing_behind(backend: LlamaBackend):
    fill(backend, 0, list(range(300, 400)))
    state = saved_state(backend, 0)
    assert not backend.state_set(1, state[: len(state) // 2])
    assert not backend.state_set(1, bytearray(b"\xff" * len(state)))
    assert n_held(backend, 1) == 0
    fill(backend, 1, list(range(300, 310)))


def test_a_window_that_no_sequence_outgrows_is_plain_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "gemma3.gguf"
    synthesize("tiny-gemma3", "Q4_0", path)
    monkeypatch.setattr(native, "llama_model_n_swa", lambda model: N_CELLS)
    opened = open_kind(path)
    assert opened.memory_kind is MemoryKind.ATTENTION
    opened.close()


# --- conversations -------------------------------------------------------------------------------------------------


def test_a_conversation_goes_on_from_where_it_ended(backend: LlamaBackend):
    run = Run(backend)
    prompt = tokens_of(backend, SYSTEM + FIRST)
    assert len(prompt) > 2 * N_WINDOW
    assert run.ask(prompt, n_predict=40) == [0]
    more = [*prompt, *run.outputs[0], *tokens_of(backend, "<|im_end|>\n" + SECOND)]
    # The last token of an answer is never computed.
    assert run.ask(more) == [len(prompt) + 39]
    run.assert_plain()


def test_a_conversation_too_large_for_memory_goes_on_in_its_cells(
    backend: LlamaBackend, monkeypatch: pytest.MonkeyPatch
):
    run = Run(backend, ram_cache_bytes=1000)
    monkeypatch.setattr(backend, "state_set", lambda seq, state: pytest.fail("a state was copied"))
    prompt = tokens_of(backend, SYSTEM + FIRST)
    assert run.ask(prompt, n_predict=20) == [0]
    more = [*prompt, *run.outputs[0], *tokens_of(backend, "<|im_end|>\n" + SECOND)]
    assert run.ask(more) == [len(prompt) + 19]
    third = [*more, *run.outputs[1], *tokens_of(backend, "<|im_end|>\n" + FIRST)]
    assert run.ask(third) == [len(more) + 7]
    assert run.engine.cache.tiers.size_bytes == 0
    run.assert_plain()


def test_the_same_prompt_again_computes_what_follows_its_last_message(backend: LlamaBackend):
    run = Run(backend)
    prompt = tokens_of(backend, SYSTEM + FIRST)
    assert run.ask(prompt) == [0]
    assert run.ask(prompt) == [len(tokens_of(backend, (SYSTEM + FIRST).removesuffix("\n<|im_start|>assistant\n")))]
    run.assert_plain()


def test_another_conversation_with_the_same_system_message_starts_behind_it(backend: LlamaBackend):
    run = Run(backend)
    n_system = len(tokens_of(backend, SYSTEM.rstrip()))
    assert run.ask(tokens_of(backend, SYSTEM + FIRST)) == [0]
    assert run.ask(tokens_of(backend, SYSTEM + SECOND)) == [n_system]
    run.assert_plain()


def test_an_edited_last_message_keeps_what_comes_before_it(backend: LlamaBackend):
    run = Run(backend)
    before = SYSTEM + FIRST + "It pulls at the sea, twice every day.<|im_end|>\n"
    run.ask(tokens_of(backend, before + SECOND))
    edited = tokens_of(backend, before + SECOND.replace("old", "wise"))
    assert run.ask(edited) == [len(tokens_of(backend, before.rstrip()))]
    run.assert_plain()


def test_two_cold_prompts_with_the_same_system_message_compute_it_once(backend: LlamaBackend):
    run = Run(backend)
    prompts = [tokens_of(backend, SYSTEM + text) for text in (FIRST, SECOND)]
    n_system = len(tokens_of(backend, SYSTEM.rstrip()))
    assert run.ask(*prompts) == [0, n_system]
    totals = run.engine.totals
    # Of eight tokens of output the last one is never computed.
    assert totals.prefill_tokens + totals.decode_tokens == sum(map(len, prompts)) - n_system + 2 * 7
    run.assert_plain()


def test_a_beginning_without_messages_is_shared_from_where_two_prompts_part(backend: LlamaBackend):
    run = Run(backend)
    common = list(range(300, 420))
    prompts = [common + [700 + index] * 50 for index in range(3)]
    assert run.ask(*prompts) == [0, len(common), len(common)]
    run.assert_plain()


def test_without_memory_for_states_everything_is_computed_and_nobody_waits_for_another(backend: LlamaBackend):
    run = Run(backend, ram_cache_bytes=0)
    prompts = [tokens_of(backend, SYSTEM + text) for text in (FIRST, SECOND)]
    assert run.ask(*prompts) == [0, 0]
    assert run.ask(prompts[0]) == [0]
    run.assert_plain()


# --- trouble -------------------------------------------------------------------------------------------------------


def test_a_full_pool_preempts_and_the_states_come_back(backend: LlamaBackend):
    run = Run(backend)
    prompts = [[400 + 100 * index + at for at in range(100)] for index in range(4)]
    run.ask(*prompts, n_predict=120)
    assert run.engine.totals.preemptions > 0
    assert (
        run.engine.totals.prefill_tokens
        < sum(map(len, prompts)) + run.engine.totals.preemptions * CHECKPOINT_GAP_TOKENS
    )
    run.assert_plain()


def test_one_request_may_fill_the_pool(backend: LlamaBackend):
    run = Run(backend)
    prompt = [300 + at for at in range(700)]
    run.ask(prompt, n_predict=N_CELLS - len(prompt))
    run.assert_plain()


def test_a_step_that_breaks_off_half_way_loses_nothing(backend: LlamaBackend, monkeypatch: pytest.MonkeyPatch):
    run = Run(backend)
    n_decodes, decode = 0, backend.decode

    def break_off(n_rows: int) -> None:
        nonlocal n_decodes
        n_decodes += 1
        decode(n_rows)
        if n_decodes in (2, 9):
            raise DecodeFailed("broken off", is_fatal=True)

    monkeypatch.setattr(backend, "decode", break_off)
    prompt = tokens_of(backend, SYSTEM + FIRST)
    run.ask(prompt, [5] * 20, n_predict=12)
    assert n_decodes > 9
    monkeypatch.undo()
    run.assert_plain()


def test_a_state_out_of_the_cache_that_is_damaged_is_computed_anew(backend: LlamaBackend):
    run = Run(backend)
    prompt = tokens_of(backend, SYSTEM + FIRST)
    run.ask(prompt)
    longest = run.engine.cache.tiers.match(PrefixKey(prompt), len(prompt)).states()[-1]
    damaged = longest.data
    assert isinstance(damaged, bytearray)
    damaged[:4] = b"\xff\xff\xff\xff"
    (n_cached,) = run.ask(prompt)
    assert CHECKPOINT_GAP_TOKENS < n_cached < longest.end
    run.assert_plain()
