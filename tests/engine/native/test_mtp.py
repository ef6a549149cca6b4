"""Drafts by the model's own layer. A wrong hidden state, token or position shows in nothing but wrong drafts, so there
is a model here whose layer is always right if it gets what it must.

In that model every layer adds nothing, the vectors of the tokens are such that one matrix makes each of them the next
one's, and a token is followed by the next one. The layer that drafts applies this matrix to the hidden state alone. So
it drafts the token after the next of the row that the state is from: with another row's state every draft is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, cast

import gguf
import numpy as np
import pytest

from localrun.engine import engine as engine_module
from localrun.engine.backend import DecodeFailed
from localrun.engine.native import drafters
from localrun.engine.native.drafters import MOST_TOKENS, MtpHeads, has_heads
from localrun.engine.native.llama import LlamaBackend
from localrun.engine.native.model import tensors_of
from localrun.engine.request import Request
from localrun.engine.speculate.choice import DraftChoice, DraftLimits, DraftStream, RowCosts
from localrun.engine.speculate.speculation import Speculation
from localrun.wire import DraftCounts, DraftSource, Sampling, Submit
from tests.engine.conftest import saved_state
from tests.engine.native.test_drafts import answers, check_alike
from tests.engine.speculate.drafters import always
from tests.engine.stepped import SteppedEngine
from tests.support.synthesis.synthesize import add_tokenizer, synthesize, write_model
from tests.support.synthesis.synthetic_tokenizer import make_vocabulary
from tests.support.synthesis.tensor_plan import SHAPES, plan_tensors

N_SEQS, N_BATCH, N_CELLS = 4, 64, 512
SHAPE = SHAPES["tiny-qwen35-nextn"]
ROUNDING = 0.02


@dataclass
class Text:
    """What drafters know of a request."""

    seq: int
    tokens: list[int] = field(default_factory=list)


def as_request(text: Text) -> Request:
    return cast(Request, text)


def random_file(folder: Path) -> Path:
    path = folder / "random.gguf"
    synthesize(SHAPE.name, "F16", path)
    return path


def following(width: int) -> tuple[Any, Any]:
    """The vectors of the tokens, and the matrix that makes each of them the next one's."""
    rng = np.random.default_rng(4)
    # A turn of coordinates in circles of these lengths has no repetition among so many tokens.
    circles = np.split(np.arange(width), [127, 255])
    turned = np.concatenate([np.roll(circle, 1) for circle in circles])
    vectors = np.empty((SHAPE.n_vocab, width))
    vectors[0] = rng.choice([-1.0, 1.0], width)
    for token in range(1, SHAPE.n_vocab):
        vectors[token] = vectors[token - 1][turned]
    return vectors, np.eye(width)[turned]


def hybrid_file(folder: Path) -> Path:
    """See the module."""
    path = folder / "hybrid.gguf"
    synthesize(SHAPE.name, "F16", path)
    vectors, turn = following(SHAPE.n_embd)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path, "r+").tensors}
    for name, tensor in tensors.items():
        if name.endswith(("attn_output.weight", "ssm_out.weight", "ffn_down.weight")):
            tensor.data[:] = 0
    tensors["token_embd.weight"].data[:] = vectors
    tensors["output.weight"].data[:] = np.roll(vectors, 1, axis=0)
    tensors[f"blk.{SHAPE.n_layers}.nextn.eh_proj.weight"].data[:] = np.hstack([0 * turn, turn])
    tensors["token_embd.weight"].data.base.flush()
    return path


def attention_file(folder: Path) -> Path:
    """The same of an architecture that keeps every position. Its layer has experts."""
    path = folder / "attention.gguf"
    width, head, n_heads, n_experts, n_ff = 256, 64, 4, 2, 32
    writer = gguf.GGUFWriter(path, "glm4moe")
    writer.add_context_length(4096)
    writer.add_embedding_length(width)
    writer.add_block_count(2)
    writer.add_nextn_predict_layers(1)
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(n_heads)
    writer.add_head_count_kv(n_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(SHAPE.n_vocab)
    writer.add_leading_dense_block_count(1)
    writer.add_expert_count(n_experts)
    writer.add_expert_used_count(1)
    writer.add_expert_shared_count(0)
    writer.add_expert_feed_forward_length(n_ff)
    add_tokenizer(writer, make_vocabulary(SHAPE.n_vocab))
    vectors, turn = following(width)
    rng = np.random.default_rng(5)
    tensors = {"token_embd": vectors, "output": np.roll(vectors, 1, axis=0), "output_norm": np.ones(width)}
    for layer in range(2):
        own = {name: np.ones(width) for name in ("attn_norm", "post_attention_norm")}
        own |= {f"attn_{name}": rng.normal(0, 0.06, (n_heads * head, width)) for name in "qkv"}
        own["attn_output"] = np.zeros((width, n_heads * head))
        kind, experts = ("_exps", (n_experts,)) if layer else ("", ())
        own |= {f"ffn_{name}{kind}": rng.normal(0, 0.06, (*experts, n_ff, width)) for name in ("gate", "up")}
        own[f"ffn_down{kind}"] = np.zeros((*experts, width, n_ff))
        if layer:
            own["ffn_gate_inp"] = rng.normal(0, 0.06, (n_experts, width))
            own |= {"nextn.eh_proj": np.hstack([0 * turn, turn])}
            own |= {"nextn.enorm": np.ones(width), "nextn.hnorm": np.ones(width)}
        tensors |= {f"blk.{layer}.{name}": values for name, values in own.items()}
    for name, values in tensors.items():
        writer.add_tensor(f"{name}.weight", values.astype(np.float32))
    writer.add_tensor("blk.1.exp_probs_b.bias", np.zeros(n_experts, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def opened(path: Path, *, n_cells: int = N_CELLS, **options: Any) -> LlamaBackend:
    return LlamaBackend(
        str(path), n_cells=n_cells, n_seqs=N_SEQS, n_batch=N_BATCH, n_threads=1, n_gpu_layers=0, kv_type="f16",
        **options,
    )  # fmt: skip


@pytest.fixture(scope="module", params=["hybrid", "attention", "attention, split"])
def rigged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaBackend]:
    folder = tmp_path_factory.mktemp("nextn")
    path = hybrid_file(folder) if request.param == "hybrid" else attention_file(folder)
    is_split = request.param.endswith("split")
    backend = opened(path, n_cells=N_CELLS * (N_SEQS if is_split else 1), may_split=is_split)
    assert backend.is_split == is_split
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def random(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaBackend]:
    backend = opened(random_file(tmp_path_factory.mktemp("nextn")))
    yield backend
    backend.close()


@pytest.fixture(autouse=True)
def _empty(request: pytest.FixtureRequest) -> None:
    for name in {"rigged", "random"} & set(request.fixturenames):
        backend = request.getfixturevalue(name)
        for seq in range(N_SEQS):
            assert backend.seq_remove(seq, 0)
            heads_of(backend).context.seq_remove(seq, 0)


def heads_of(backend: LlamaBackend) -> MtpHeads:
    assert isinstance(backend.heads, MtpHeads)
    return backend.heads


def step(backend: LlamaBackend, rows: list[tuple[int, int, list[int]]]) -> list[list[int]]:
    """One decode, of tokens from a position on of each sequence. Returns what the model says after each of them."""
    batch, at = backend.batch, 0
    for seq, start, tokens in rows:
        part = slice(at, at + len(tokens))
        batch.token[part], batch.seq[part] = tokens, seq
        batch.pos[part] = range(start, start + len(tokens))
        batch.wants_logits[part] = len(tokens) <= 1 + MOST_TOKENS
        batch.wants_logits[part.stop - 1] = 1
        at = part.stop
    backend.decode(at)
    heads_of(backend).decoded(at)
    said, at = [], 0
    for _, _, tokens in rows:
        wanted = range(at, at + len(tokens)) if len(tokens) <= 1 + MOST_TOKENS else [at + len(tokens) - 1]
        said.append([int(backend.logits(row).argmax()) for row in wanted])
        at += len(tokens)
    return said


def begin(backend: LlamaBackend, seq: int, prompt: list[int]) -> Text:
    text = Text(seq, list(prompt))
    for start in range(0, len(prompt), N_BATCH):
        said = step(backend, [(seq, start, prompt[start : start + N_BATCH])])
    text.tokens.append(said[0][-1])
    return text


def generate(
    backend: LlamaBackend, texts: list[Text], n_steps: int, *, spoil: Callable[[int, list[int]], None] | None = None
) -> tuple[int, int]:
    """Greedy steps with as many drafts as there may be. Returns how many were drafted, and how many were right."""
    n_drafted = n_right = 0
    for at in range(n_steps):
        drafts = heads_of(backend).propose([(as_request(text), MOST_TOKENS) for text in texts])
        for draft in drafts:
            draft += [0] * (MOST_TOKENS - len(draft))
            if spoil is not None:
                spoil(at, draft)
        rows = [
            (text.seq, len(text.tokens) - 1, [text.tokens[-1], *draft])
            for text, draft in zip(texts, drafts, strict=True)
        ]
        for text, draft, said in zip(texts, drafts, step(backend, rows), strict=True):
            right = 0
            while right < len(draft) and draft[right] == said[right]:
                right += 1
            text.tokens += said[: right + 1]
            if right < len(draft):
                assert backend.seq_remove(text.seq, len(text.tokens) - 1)
            n_drafted, n_right = n_drafted + len(draft), n_right + right
    return n_drafted, n_right


# --- which files have one ------------------------------------------------------------------------------------------


def test_a_file_has_it_or_has_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = random_file(tmp_path)
    assert has_heads(tensors_of(str(path)))
    monkeypatch.setattr(drafters, "_TRIED_VERSION", "0.3.99")
    assert not has_heads(tensors_of(str(path)))
    assert not has_heads(tensors_of(str(tmp_path / "no such file")))


def test_another_architecture_with_such_tensors_runs_without(tmp_path: Path):
    path = tmp_path / "llama.gguf"
    shape = replace(SHAPES["tiny"], n_nextn=1)
    write_model(path, shape, list(plan_tensors(shape, "F16")), "F16", make_vocabulary(shape.n_vocab), 0)
    assert not has_heads(tensors_of(str(path)))


# --- drafts that are right -----------------------------------------------------------------------------------------


def test_every_draft_is_right_where_the_layer_knows_it(rigged: LlamaBackend):
    texts = [begin(rigged, seq, list(range(first, first + 30))) for seq, first in ((0, 300), (1, 900), (2, 1500))]
    n_drafted, n_right = generate(rigged, texts, 8)
    assert n_right == n_drafted == 3 * 8 * MOST_TOKENS
    for text in texts:
        assert text.tokens == list(range(text.tokens[0], text.tokens[0] + len(text.tokens)))


def test_every_draft_is_right_whoever_else_is_in_the_batch(rigged: LlamaBackend):
    """Other streams at each step, in another order, with other numbers of drafts, some of them wrong."""
    chance = Random(2)
    texts = [begin(rigged, seq, list(range(first, first + 9))) for seq, first in enumerate((300, 700, 1100, 1500))]
    n_drafted = 0
    for _ in range(40):
        chosen = chance.sample(texts, chance.randint(1, len(texts)))
        drafts = heads_of(rigged).propose([(as_request(text), chance.randint(0, MOST_TOKENS)) for text in chosen])
        rows = []
        for text, draft in zip(chosen, drafts, strict=True):
            last = text.tokens[-1]
            assert draft == list(range(last + 1, last + 1 + len(draft)))
            n_drafted += len(draft)
            if draft and chance.random() < 0.3:
                draft[-1] += 7
            rows.append((text.seq, len(text.tokens) - 1, [last, *draft]))
        for text, draft, said in zip(chosen, drafts, step(rigged, rows), strict=True):
            right = next((at for at, token in enumerate(draft) if token != said[at]), len(draft))
            text.tokens += said[: right + 1]
            if right < len(draft):
                assert rigged.seq_remove(text.seq, len(text.tokens) - 1)
        for text in texts:
            assert text.tokens == list(range(text.tokens[0], text.tokens[0] + len(text.tokens)))
    assert n_drafted > 80


def test_drafts_are_right_again_right_after_wrong_ones(rigged: LlamaBackend):
    def spoil(at: int, draft: list[int]) -> None:
        if at % 2 == 0:
            draft[at // 2 % MOST_TOKENS] += 7

    text = begin(rigged, 0, list(range(300, 330)))
    n_drafted, n_right = generate(rigged, [text], 12, spoil=spoil)
    assert n_drafted == 12 * MOST_TOKENS
    assert n_right == 6 * MOST_TOKENS + 2 * (0 + 1 + 2)


def test_with_the_hidden_state_of_another_row_every_draft_is_wrong(
    rigged: LlamaBackend, monkeypatch: pytest.MonkeyPatch
):
    hidden_at = MtpHeads._hidden_at
    monkeypatch.setattr(MtpHeads, "_hidden_at", lambda self, seq, position: hidden_at(self, seq, position - 1))
    n_drafted, n_right = generate(rigged, [begin(rigged, 0, list(range(300, 330)))], 8)
    assert (n_drafted, n_right) == (8 * MOST_TOKENS, 0)


def test_drafts_go_on_behind_a_hole(rigged: LlamaBackend):
    text = begin(rigged, 0, list(range(300, 330)))
    state = saved_state(rigged, 0)
    assert rigged.state_set(3, state)
    moved = Text(3, text.tokens)
    assert heads_of(rigged).propose([(as_request(moved), 2)]) == [[]], "nothing is known of that sequence"
    assert generate(rigged, [moved], 1)[1] == 0
    assert generate(rigged, [moved], 4) == (4 * MOST_TOKENS, 4 * MOST_TOKENS)


def test_another_text_in_the_same_sequence_is_drafted_for(rigged: LlamaBackend):
    generate(rigged, [begin(rigged, 0, list(range(300, 400)))], 3)
    assert rigged.seq_remove(0, 0)
    assert generate(rigged, [begin(rigged, 0, list(range(800, 820)))], 4) == (4 * MOST_TOKENS, 4 * MOST_TOKENS)


def test_what_others_left_behind_makes_room(rigged: LlamaBackend):
    begin(rigged, 0, list(range(300, 300 + N_CELLS - 100)))
    assert rigged.seq_remove(0, 0)
    text = begin(rigged, 1, list(range(800, 800 + N_CELLS - 100)))
    assert generate(rigged, [text], 4) == (4 * MOST_TOKENS, 4 * MOST_TOKENS)


def test_each_request_gets_as_many_as_it_wants(rigged: LlamaBackend):
    texts = [begin(rigged, seq, list(range(300 * (seq + 1), 300 * (seq + 1) + 20))) for seq in range(3)]
    wanted = [(as_request(text), n) for text, n in zip(texts, (2, 0, 99), strict=True)]
    first, none, third = heads_of(rigged).propose(wanted)
    assert first == [321, 322]
    assert none == []
    assert third == list(range(921, 921 + MOST_TOKENS))
    assert heads_of(rigged).propose(wanted) == [first, none, third], "asked again, it says the same"


def test_a_failure_ends_the_drafts_and_nothing_else(rigged: LlamaBackend, monkeypatch: pytest.MonkeyPatch):
    text = begin(rigged, 0, list(range(300, 330)))
    heads = heads_of(rigged)

    def fail(n_rows: int) -> None:
        raise DecodeFailed("llama_decode returned -3", is_fatal=True)

    monkeypatch.setattr(heads.context, "decode", fail)
    assert heads.propose([(as_request(text), 2)]) == [[]]
    monkeypatch.undo()
    assert generate(rigged, [text], 2) == (2 * MOST_TOKENS, 0)
    heads._is_broken = False


def test_a_rebuilt_backend_drafts_again(tmp_path: Path):
    backend = opened(hybrid_file(tmp_path))
    backend.rebuild()
    assert generate(backend, [begin(backend, 0, list(range(300, 330)))], 2) == (2 * MOST_TOKENS, 2 * MOST_TOKENS)
    backend.close()


def test_rows_of_a_step_that_takes_several_passes_keep_their_hidden_states(rigged: LlamaBackend):
    starts = {2: (300, 20), 0: (700, 9), 1: (1200, 33)}
    rows = [(seq, 0, list(range(first, first + count))) for seq, (first, count) in starts.items()]
    step(rigged, rows)
    for seq, (first, count) in starts.items():
        text = Text(seq, list(range(first, first + count + 1)))
        assert heads_of(rigged).propose([(as_request(text), 2)]) == [[text.tokens[-1] + 1, text.tokens[-1] + 2]]


def as_many_as_possible(streams: Sequence[DraftStream], costs: RowCosts, limits: DraftLimits) -> DraftChoice:
    n_each = min(limits.most_each, limits.most_rows // len(streams))
    return DraftChoice((n_each,) * len(streams), 1.0, 1.0)


def test_an_engine_answers_with_them(rigged: LlamaBackend):
    engine = SteppedEngine(
        rigged,
        engine_module.Limits(N_SEQS, 8, 0.0, 0),
        lambda: 0.0,
        speculation=Speculation(rigged, lambda: 0.0, heads=lambda: rigged.heads, policy=always(as_many_as_possible)),
    )
    prompts = {number: list(range(400 * number + 300, 400 * number + 320 + 50 * number)) for number in range(3)}
    texts: dict[int, list[int]] = {number: [] for number in prompts}
    counts: dict[int, DraftCounts] = {}
    n_steps = 0
    for number, prompt in prompts.items():
        engine.submit(Submit(id=number, sampling=Sampling(temperature=0), n_predict=40), list(prompt))
    while not engine.is_idle:
        said = engine.step()
        n_steps += said is not None and bool(said.deltas)  # others wait for what is computed beside them
        engine.cache.check_integrity()
        for delta in said.deltas if said is not None else ():
            texts[delta.id] += delta.tokens
            if delta.usage is not None:
                (counts[delta.id],) = delta.usage.drafts
    for number, prompt in prompts.items():
        assert texts[number] == list(range(prompt[-1] + 1, prompt[-1] + 41))
        assert counts[number].source is DraftSource.MTP
        # Where three streams share the rows of all passes, the 39 tokens after the first are two drafts and one more.
        assert counts[number].n_accepted == counts[number].n_drafted >= 26
    assert n_steps < 20
    engine.close()


def test_wrong_drafts_change_no_answer(random: LlamaBackend):
    greedy = Sampling(temperature=0)
    submits = [
        Submit(id=number, sampling=greedy, n_predict=40, ignore_eos=True, logprobs=True, n_probs=5)
        for number in range(3)
    ]  # fmt: skip
    plain = answers(random, Speculation(random, lambda: 0.0, is_on=False), submits)
    speculation = Speculation(random, lambda: 0.0, heads=lambda: random.heads, policy=always(as_many_as_possible))
    drafted = answers(random, speculation, submits)
    for number, answer in drafted.items():
        assert answer.n_drafted > 40
        check_alike(answer, plain[number])


# --- the layer's own memory ----------------------------------------------------------------------------------------


def test_piece_by_piece_and_with_wrong_drafts_it_computes_what_it_computes_at_once(random: LlamaBackend):
    """Here the layer attends to what was before, as a real one does."""
    rng = np.random.default_rng(8)
    texts = [begin(random, seq, rng.integers(3, 2000, 10 + seq).tolist()) for seq in range(3)]
    generate(random, texts, 10)
    heads = heads_of(random)
    for text in texts:
        heads.propose([(as_request(text), 1)])
        found = heads.context.logits(0).copy()
        assert random.seq_remove(3, 0)
        fresh = Text(3, text.tokens)
        step(random, [(3, 0, fresh.tokens[:-1])])
        heads.propose([(as_request(fresh), 1)])
        expected = heads.context.logits(0)
        assert np.abs(found - expected).max() < ROUNDING * np.abs(expected).max()


def test_it_reads_the_token_and_what_came_before(random: LlamaBackend):
    """The layer's logits after another last token, or another text before it, are others."""
    rng = np.random.default_rng(8)
    heads = heads_of(random)

    def logits(tokens: list[int]) -> Any:
        assert random.seq_remove(0, 0)
        step(random, [(0, 0, tokens[:-1])])
        heads.propose([(as_request(Text(0, tokens)), 1)])
        return heads.context.logits(0).copy()

    tokens = rng.integers(3, 2000, 20).tolist()
    expected = logits(tokens)
    np.testing.assert_allclose(logits(tokens), expected, atol=1e-3)
    for at in (0, 10, 18, 19):
        other = [*tokens[:at], tokens[at] + 1, *tokens[at + 1 :]]
        assert np.abs(logits(other) - expected).max() > 0.02 * np.abs(expected).max()
