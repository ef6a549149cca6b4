"""Which model may draft for another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from localrun.errors import BadRequest
from localrun.models import draft
from localrun.models.draft import MAX_DIFFERENCE, find, vocabulary_problem
from localrun.models.gguf.reader import read_header
from localrun.models.storage.store import Store
from tests.models.handmade import ENTRIES, STRING, U32, array, entry, file_bytes, text, u32

TOKENS = [f"token {number}" for number in range(1000)]

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """`write("small", tokens=..., kind=..., bos=..., eos=...)`: a file in the models folder with such a tokenizer."""

    def make(
        name: str, *, tokens: Sequence[str] = TOKENS, kind: str = "gpt2", bos: int | None = 1, eos: int | None = 2,
        more: tuple[bytes, ...] = (),
    ) -> Path:  # fmt: skip
        ids = {"bos": bos, "eos": eos}
        entries = (
            *ENTRIES[:-2],
            entry("tokenizer.ggml.model", STRING, text(kind)),
            array("tokenizer.ggml.tokens", STRING, len(tokens), b"".join(map(text, tokens))),
            *(entry(f"tokenizer.ggml.{key}_token_id", U32, u32(n)) for key, n in ids.items() if n is not None),
            *more,
        )
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(file_bytes(entries))
        return path

    return make


def _problem(target: Path, small: Path) -> str:
    return vocabulary_problem(read_header(target), read_header(small))


def _without(tokens: Sequence[str], number: int, other: str) -> list[str]:
    return [*tokens[:number], other, *tokens[number + 1 :]]


@pytest.mark.parametrize(
    "tokens",
    [TOKENS, TOKENS[:-MAX_DIFFERENCE], [*TOKENS, *("more",) * MAX_DIFFERENCE], ["<unk>", *"abcd", *TOKENS[5:]]],
    ids=["the same", "smaller", "larger", "other first ones"],
)
def test_vocabularies_that_fit(write: Write, tokens: list[str]) -> None:
    assert _problem(write("target"), write("small", tokens=tokens)) == ""


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"kind": "llama"}, "its type of tokenizer is 'llama', the other's 'gpt2'"),
        ({"bos": 0}, "its token for the beginning is 0, the other's 1"),
        ({"eos": None}, "its token for the end is not stated, the other's 2"),
        ({"tokens": TOKENS[: -MAX_DIFFERENCE - 1]}, "has 871 tokens, the other's 1000, and they may differ by 128"),
        ({"tokens": _without(TOKENS, 5, "token X")}, "its token 5 is 'token X', the other's 'token 5'"),
        ({"tokens": _without(TOKENS, 700, "much longer")}, "its token 700 is 'much longer', the other's 'token 700'"),
        ({"tokens": _without(TOKENS, 999, "x")}, "its token 999 is 'x', the other's 'token 999'"),
        ({"tokens": ["a", "b"]}, "no vocabulary"),
    ],
)
def test_vocabularies_that_do_not(write: Write, changes: dict[str, Any], problem: str) -> None:
    assert problem in _problem(write("target"), write("small", **changes))


def test_texts_are_compared_to_the_end_whatever_the_chunks(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft, "_CHUNK_BYTES", 7)
    assert _problem(write("target"), write("small")) == ""
    for number in (5, 6, 501, 999):
        assert f"token {number} is" in _problem(write("target"), write("small", tokens=_without(TOKENS, number, "x")))


def test_what_is_no_draft_model_is_refused_with_a_way_out(write: Write, tmp_path: Path) -> None:
    store = Store(tmp_path)
    target = read_header(write("target"))
    write("embedder", more=(entry("llama.pooling_type", U32, u32(1)),))
    write("other", kind="llama")
    recurrent = write("recurrent")
    recurrent.write_bytes(recurrent.read_bytes().replace(b"llama", b"mamba"))
    (tmp_path / "again.gguf").symlink_to(tmp_path / "target.gguf")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")

    def refusal(name: str) -> str:
        with pytest.raises(BadRequest) as caught:
            find(store, name, model="target", target=target)
        assert caught.value.field == "draft"
        return caught.value.message

    assert "'nowhere' is not here; get it first (localrun pull nowhere)" in refusal("nowhere")
    assert "give the path of a GGUF file that is there" in refusal(str(tmp_path / "nowhere.gguf"))
    assert "'target' itself" in refusal("target")
    assert "'target' itself" in refusal("again")
    assert "embeddings" in refusal("embedder")
    assert "recurrent layers" in refusal("recurrent")
    assert "broken.gguf" in refusal("broken")
    assert "cannot draft for 'target': its type of tokenizer" in refusal("other")
    assert "name a model of the same family" in refusal("other")


def test_the_pair_is_read_once(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, target = Store(tmp_path), read_header(write("target"))
    write("small")
    seen: list[object] = []
    monkeypatch.setattr(draft, "_first_difference", lambda *texts: seen.append(texts))
    assert [find(store, "small", model="target", target=target).name for _ in range(3)] == ["small"] * 3
    assert len(seen) == 1
