"""The real backend on a synthesized model: what localrun relies on llama.cpp for."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from localrun.engine.backend import DecodeFailed
from localrun.engine.engine import Limits
from localrun.engine.native import model as llama_model
from localrun.engine.native.library import native
from localrun.engine.native.llama import LlamaBackend
from localrun.errors import BadModelFile, EngineFailed
from localrun.wire import Finish, Sampling, Submit
from tests.engine.conftest import compute, n_held, open_tiny, saved_state
from tests.engine.stepped import SteppedEngine

PROMPT = list(range(300, 340))
GREEDY = Sampling(temperature=0)


def generate(backend: LlamaBackend, sampling: Sampling, count: int, *, ignore_eos: bool = False) -> list[int]:
    """`count` tokens after PROMPT in sequence 0."""
    backend.seq_remove(0, 0)
    sampler = backend.sampler(sampling, ignore_eos=ignore_eos)
    sampler.accept(PROMPT)
    compute(backend, 0, PROMPT)
    tokens = [sampler.sample(len(PROMPT) - 1)]
    while len(tokens) < count:
        compute(backend, 0, tokens[-1:], start=len(PROMPT) + len(tokens) - 1)
        tokens.append(sampler.sample(0))
    sampler.close()
    sampler.close()
    return tokens


# --- vocabulary ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["hello world", "  two  spaces\n\nand lines\t", "naïve 日本語 🦊", "", "<|im_start|>"])
def test_text_that_nobody_trusts_comes_back_byte_for_byte_and_holds_no_control_token(backend: LlamaBackend, text: str):
    tokens = backend.tokenize(text, parse_special=False)
    assert b"".join(map(backend.piece, tokens)) == text.encode()


def test_control_text_becomes_its_token_only_where_it_is_trusted(backend: LlamaBackend):
    assert "<|im_end|>" in backend.control_tokens
    (end,) = backend.tokenize("<|im_end|>", parse_special=True)
    assert end in backend.eog_tokens
    assert backend.piece(end) == b""
    assert end not in backend.tokenize("<|im_end|>", parse_special=False)


def test_half_a_surrogate_pair_is_read_as_some_other_character(backend: LlamaBackend):
    assert backend.tokenize("a\ud800b", parse_special=True)


def test_a_long_text_with_control_tokens_is_cut_without_a_trace(backend: LlamaBackend):
    text = "<|im_start|>user\nhello there <|im_end|>\n"
    assert backend.tokenize(text * 2000, parse_special=True) == backend.tokenize(text, parse_special=True) * 2000


def test_a_flood_of_control_tokens_takes_time_by_its_length(backend: LlamaBackend):
    assert backend.tokenize("<|im_start|>" * 100_000, parse_special=True) == (
        backend.tokenize("<|im_start|>", parse_special=True) * 100_000
    )


# --- memory --------------------------------------------------------------------------------------------------------


def test_a_shared_prefix_gives_the_logits_that_computing_it_gives(backend: LlamaBackend):
    own = compute(backend, 0, PROMPT)
    backend.seq_share(0, 1, 0, 30)
    np.testing.assert_allclose(compute(backend, 1, PROMPT[30:], start=30), own, atol=1e-3)


def test_a_saved_sequence_comes_back_in_another_one(backend: LlamaBackend):
    compute(backend, 0, PROMPT)
    state = saved_state(backend, 0)
    expected = compute(backend, 0, [7], start=len(PROMPT))
    backend.seq_remove(0, 0)
    compute(backend, 1, [9] * 20)  # the cells are others than before
    assert backend.state_set(5, state)
    np.testing.assert_allclose(compute(backend, 5, [7], start=len(PROMPT)), expected, atol=1e-3)


def test_a_state_over_the_limit_is_not_made(backend: LlamaBackend):
    compute(backend, 0, PROMPT)
    size_bytes = len(saved_state(backend, 0))
    assert backend.state_get(0, limit_bytes=size_bytes) is not None
    assert backend.state_get(0, limit_bytes=size_bytes - 1) is None


def test_a_damaged_state_is_refused_and_leaves_nothing_behind(backend: LlamaBackend):
    compute(backend, 0, PROMPT)
    state = saved_state(backend, 0)
    assert not backend.state_set(1, state[: len(state) // 2])
    assert not backend.state_set(1, bytearray(b"\xff" * len(state)))
    compute(backend, 1, PROMPT)  # position 0 is free


def test_a_removed_tail_can_be_computed_anew(backend: LlamaBackend):
    own = compute(backend, 0, PROMPT)
    compute(backend, 0, [1, 2, 3], start=len(PROMPT))
    assert backend.seq_remove(0, 20)
    np.testing.assert_allclose(compute(backend, 0, PROMPT[20:], start=20), own, atol=1e-3)


# --- sampling ------------------------------------------------------------------------------------------------------


def test_greedy_is_the_argmax_with_and_without_native_stages(backend: LlamaBackend):
    logits = compute(backend, 0, PROMPT)
    first = int(logits.argmax())
    for sampling in (
        GREEDY,
        Sampling(temperature=1e-40),
        Sampling(temperature=0, logit_bias=((5, 0.0),)),
        Sampling(temperature=1, top_k=1),
        Sampling(temperature=1, top_p=1e-6),
        Sampling(temperature=1, min_p=1.0),
    ):
        assert backend.sampler(sampling, ignore_eos=False).sample(len(PROMPT) - 1) == first


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ignoring_the_end_never_yields_an_end_token(backend: LlamaBackend, temperature: float):
    push = tuple((token, 50.0) for token in backend.eog_tokens)
    sampling = Sampling(temperature=temperature, seed=1, logit_bias=push)
    assert set(generate(backend, sampling, 5)) <= backend.eog_tokens
    assert not set(generate(backend, sampling, 30, ignore_eos=True)) & backend.eog_tokens


def test_logits_are_whole_again_after_the_end_was_banned(backend: LlamaBackend):
    before = compute(backend, 0, PROMPT)
    backend.sampler(GREEDY, ignore_eos=True).sample(len(PROMPT) - 1)
    np.testing.assert_array_equal(backend.logits(len(PROMPT) - 1), before)


def test_logprobs_are_those_of_the_whole_vocabulary_best_first(backend: LlamaBackend):
    logits = compute(backend, 0, PROMPT)
    row = len(PROMPT) - 1
    token = int(logits.argsort()[-3])
    logprob, top = backend.logprobs(row, token, backend.n_vocab)
    values = [entry.logprob for entry in top]
    assert math.isclose(sum(map(math.exp, values)), 1.0, abs_tol=1e-6)
    assert values == sorted(values, reverse=True)
    assert top[2].token == token
    assert top[2].logprob == logprob
    assert top[2].piece == backend.piece(token)
    assert backend.logprobs(row, token, 2) == (logprob, top[:2])
    assert backend.logprobs(row, token, 0) == (logprob, ())


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "repeat_penalty"])
def test_a_strong_penalty_keeps_tokens_of_the_window_away(backend: LlamaBackend, name: str):
    penalized = Sampling(temperature=0, penalty_last_n=-1, **{name: 1000.0})
    tokens = generate(backend, penalized, 30)
    assert len(set(tokens)) == 30
    assert not set(tokens) & set(PROMPT)


def test_the_window_of_penalties_is_as_long_as_asked(backend: LlamaBackend):
    """With a bias that leaves three tokens to choose from, a window of two repeats them in turn."""
    push = ((600, 500.0), (601, 500.0), (602, 500.0))
    sampling = Sampling(temperature=0, logit_bias=push, presence_penalty=100.0, penalty_last_n=2)
    tokens = generate(backend, sampling, 9)
    assert set(tokens) == {600, 601, 602}
    assert tokens[:3] == tokens[3:6] == tokens[6:]


@pytest.mark.parametrize(("name", "chosen"), [("frequency_penalty", 601), ("presence_penalty", 600)])
def test_frequency_counts_every_use_and_presence_one(backend: LlamaBackend, name: str, chosen: int):
    compute(backend, 0, PROMPT)
    push = ((600, 500.0), (601, 450.0))
    sampler = backend.sampler(Sampling(temperature=0, logit_bias=push, **{name: 40.0}), ignore_eos=False)
    sampler.accept([600, 600, 600, 601])
    assert sampler.sample(len(PROMPT) - 1) == chosen


@pytest.mark.parametrize(
    "stages",
    [
        {"top_k": 40},
        {"top_p": 0.9},
        {"min_p": 0.05},
        {"typical_p": 0.8},
        {"mirostat": 1},
        {"mirostat": 2},
        {"repeat_penalty": 1.1, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.95, "temperature": 0.7},
    ],
)
def test_the_same_seed_gives_the_same_output_and_another_seed_another(backend: LlamaBackend, stages: dict[str, float]):
    first, again, other = (generate(backend, Sampling(seed=seed, **stages), 12) for seed in (7, 7, 8))
    assert first == again
    assert first != other


@pytest.mark.parametrize("seed", [0, -1, 2**32 - 1, 2**63 - 1])
def test_every_seed_repeats(backend: LlamaBackend, seed: int):
    assert generate(backend, Sampling(seed=seed), 8) == generate(backend, Sampling(seed=seed), 8)


def test_no_seed_is_a_new_one_every_time(backend: LlamaBackend):
    assert generate(backend, Sampling(), 12) != generate(backend, Sampling(), 12)


def test_a_bias_bans_a_token_or_forces_it(backend: LlamaBackend):
    first = generate(backend, GREEDY, 1)[0]
    assert generate(backend, Sampling(temperature=0, logit_bias=((first, -math.inf),)), 1) != [first]
    assert generate(backend, Sampling(temperature=1, logit_bias=((900, 100.0),)), 4) == [900] * 4


# --- what native code must not see ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"), [("token", -1), ("token", 1 << 20), ("seq", 8), ("seq", -1), ("pos", -1), ("pos", 512)]
)
def test_a_row_out_of_range_is_refused(backend: LlamaBackend, field: str, value: int):
    compute(backend, 0, [5])
    getattr(backend.batch, field)[0] = value
    with pytest.raises(ValueError, match="not within"):
        backend.decode(1)


@pytest.mark.parametrize("n_rows", [0, -1, 65])
def test_a_batch_of_no_rows_or_too_many_is_refused(backend: LlamaBackend, n_rows: int):
    with pytest.raises(ValueError, match="rows"):
        backend.decode(n_rows)


def test_more_rows_with_logits_than_sequences_and_drafts_are_refused(tiny_gguf: Path):
    backend = open_tiny(tiny_gguf, n_cells=512, n_batch=256)
    n_rows = backend.n_seqs + backend.n_draft_rows + 1
    backend.batch.token[:n_rows] = backend.batch.seq[:n_rows] = 0
    backend.batch.pos[:n_rows] = range(n_rows)
    backend.batch.wants_logits[:n_rows] = 1
    with pytest.raises(ValueError, match="logits"):
        backend.decode(n_rows)
    backend.close()


def test_sequences_positions_tokens_and_rows_out_of_range_are_refused(backend: LlamaBackend):
    for call in (
        lambda: backend.seq_share(0, 8, 0, 1),
        lambda: backend.seq_share(-1, 0, 0, 1),
        lambda: backend.seq_share(0, 1, 5, 4),
        lambda: backend.seq_share(0, 1, 0, 513),
        lambda: backend.seq_remove(8, 0),
        lambda: backend.seq_remove(0, -1),
        lambda: backend.seq_remove(0, 0, 513),
        lambda: backend.state_get(8, limit_bytes=1),
        lambda: backend.state_set(-1, bytearray(8)),
        lambda: backend.piece(backend.n_vocab),
        lambda: backend.piece(-1),
    ):
        with pytest.raises(ValueError, match=r"below|within|vocabulary"):
            call()
    compute(backend, 0, [5, 6])
    with pytest.raises(ValueError, match="no logits"):
        backend.logits(0)


def test_a_position_that_is_not_the_next_one_is_refused_as_a_batch_and_changes_nothing(backend: LlamaBackend):
    compute(backend, 0, PROMPT)
    with pytest.raises(DecodeFailed) as caught:
        compute(backend, 0, [5], start=90)
    assert not caught.value.is_fatal
    compute(backend, 0, [5], start=len(PROMPT))


# --- files ---------------------------------------------------------------------------------------------------------


def test_a_file_that_is_no_model_is_refused_by_name(tiny_gguf: Path, tmp_path: Path):
    whole = tiny_gguf.read_bytes()
    for name, content in (("text", b"hello"), ("empty", b""), ("half", whole[: len(whole) // 2])):
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(content)
        with pytest.raises(BadModelFile, match=f"{name}.gguf"):
            open_tiny(path)
    with pytest.raises(BadModelFile, match="absent"):
        open_tiny(tmp_path / "absent.gguf")


def test_a_kind_of_model_that_writes_no_text_is_refused(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(llama_model.UNSUPPORTED_KINDS, "a diffusion", lambda model: True)
    with pytest.raises(BadModelFile, match="a diffusion model"):
        open_tiny(tiny_gguf)


def test_a_context_that_memory_cannot_hold_is_refused(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native, "llama_init_from_model", lambda model, params: None)
    with pytest.raises(EngineFailed, match="512 KV cells"):
        open_tiny(tiny_gguf)


def test_a_batch_is_never_longer_than_the_context(tiny_gguf: Path):
    backend = open_tiny(tiny_gguf, n_cells=256, n_batch=512)
    assert backend.batch.capacity == 256
    backend.close()


# --- the engine on it ----------------------------------------------------------------------------------------------


def run(backend: LlamaBackend, prompts: list[list[int]], *, n_predict: int, n_slots: int = 8) -> list[list[int]]:
    """Greedy outputs of requests that are submitted together. After every step llama.cpp and the books agree."""
    engine = SteppedEngine(backend, Limits(n_slots, 64, 0.0, 1 << 26), lambda: 0.0)
    for request_id, prompt in enumerate(prompts):
        engine.submit(Submit(id=request_id, sampling=GREEDY, n_predict=n_predict, ignore_eos=True), list(prompt))
    outputs: list[list[int]] = [[] for _ in prompts]
    finals = 0
    while not engine.is_idle:
        step = engine.step()
        engine.cache.check_integrity()
        for seq in range(backend.n_seqs):
            assert n_held(backend, seq) == engine.cache.cells.length(seq)
        for delta in step.deltas if step else ():
            outputs[delta.id] += delta.tokens
            finals += delta.finish is Finish.LENGTH
    assert finals == len(prompts)
    assert engine.cache.cells.n_used == 0
    return outputs


def test_the_engine_s_greedy_output_is_that_of_a_bare_loop(backend: LlamaBackend):
    expected = generate(backend, GREEDY, 20, ignore_eos=True)
    backend.seq_remove(0, 0)
    assert run(backend, [PROMPT], n_predict=20) == [expected]


def test_requests_that_share_cells_or_lose_them_all_end(tiny_gguf: Path):
    backend = open_tiny(tiny_gguf, n_cells=256, n_seqs=12)
    prompts = [PROMPT + [700 + index] * (3 * index) for index in range(8)]
    outputs = run(backend, prompts, n_predict=60, n_slots=6)
    assert [len(output) for output in outputs] == [60] * 8
    backend.close()


def test_greedy_alone_and_among_seven_others(tiny_gguf: Path, record_property: pytest.RecordProperty):
    """A batch of another size takes other kernels, which round differently: the rate is reported, not asserted."""
    backend = open_tiny(tiny_gguf, n_cells=2048, n_seqs=24)
    prompts = [list(range(400 + 50 * index, 420 + 53 * index)) for index in range(8)]
    together = run(backend, prompts, n_predict=48)
    alone = [run(backend, [prompt], n_predict=48)[0] for prompt in prompts]
    differing = sum(one != other for one, other in zip(together, alone, strict=True))
    record_property("greedy_outputs_that_differ_of_8", differing)
    print(f"greedy output differs in {differing} of {len(prompts)} requests")
    assert [output[0] for output in together] == [output[0] for output in alone]
    backend.close()
