"""Adapters: what their headers say, which models they fit, their names, and what a request with some of them means."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localrun.config import MAX_ADAPTERS
from localrun.errors import BadModelFile, BadRequest, Conflict, LocalrunError, NotFound
from localrun.models import adapters, builtin, creation, modelfile, naming
from localrun.models.adapters import AdapterChoice
from localrun.models.creation import Changes
from localrun.models.gguf.adapter_header import AdapterFacts, facts_of, misfit
from localrun.models.gguf.header import ADAPTERS, FileKind
from localrun.models.gguf.reader import MAX_TENSORS, read_header, read_named
from localrun.models.name import AdaptedName, split_adapters
from localrun.models.storage.manifest import Place
from localrun.models.storage.store import Store
from tests.depth import DEPTH
from tests.lora_file import RANK, write_lora, write_vector
from tests.models.adapter_files import write_pair
from tests.support.synthesis.synthesize import synthesize

NOW = datetime(2026, 1, 2, tzinfo=UTC)


@pytest.fixture
def store(tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(builtin, "model_path", lambda: tiny_gguf)
    (tmp_path / "models").mkdir()
    return Store(tmp_path / "models", hub_cache_folder=tmp_path / "hub")


def put(store: Store, name: str, write: Callable[..., Path] = write_lora, seed: int = 0) -> Path:
    """An adapter for the built-in model that lies in the models folder; later ones are newer."""
    path = write(builtin.model_path(), store.folder / f"{name}.gguf", seed=seed)
    at_s = 1_700_000_000 + len(list(store.folder.glob("*.gguf")))
    os.utime(path, (at_s, at_s))
    return path


def named(store: Store, name: str, path: Path) -> None:
    naming.point(store, name, creation.named_adapter(store, str(path), None, licence_text=None, now=NOW))


# --- headers ----------------------------------------------------------------------------------------------------------


def test_what_a_header_says(tiny_gguf: Path, tmp_path: Path) -> None:
    n_layers = read_header(tiny_gguf).n_layers
    lora = read_header(write_lora(tiny_gguf, tmp_path / "lora.gguf"), kind="adapter")
    assert facts_of(lora) == AdapterFacts(FileKind.ADAPTER, "llama", RANK, RANK * 64, "", n_layers)
    vector = read_header(write_vector(tiny_gguf, tmp_path / "vector.gguf"), kind="adapter")
    assert facts_of(vector) == AdapterFacts(FileKind.CONTROL_VECTOR, "llama", 0, 0.0, "", n_layers - 1)

    def base(writer: gguf.GGUFWriter) -> None:
        writer.add_string("general.base_model.0.name", "Tiny")

    tensors = {"blk.0.attn_q.weight.lora_a": (8, 2), "blk.0.attn_q.weight.lora_b": (2, 8)}
    assert facts_of(read_header(write_pair(tmp_path / "b.gguf", tensors, more=base), kind="adapter")).base == "Tiny"


def test_adapters_are_no_models_and_models_no_adapters(tiny_gguf: Path, tmp_path: Path) -> None:
    for path in (write_lora(tiny_gguf, tmp_path / "a.gguf"), write_vector(tiny_gguf, tmp_path / "b.gguf")):
        with pytest.raises(BadModelFile, match="is not a language model but a part for one"):
            read_header(path)
    with pytest.raises(BadModelFile, match="is no adapter but a model"):
        read_header(tiny_gguf, kind="adapter")


def _alora(writer: gguf.GGUFWriter) -> None:
    writer.add_array("adapter.alora.invocation_tokens", [1, 2])


def _wide_alpha(writer: gguf.GGUFWriter) -> None:
    writer.add_float64("adapter.lora.alpha", 1.0)


def _no_number(writer: gguf.GGUFWriter) -> None:
    writer.add_float32("adapter.lora.alpha", float("nan"))


A, B = "blk.0.attn_q.weight.lora_a", "blk.0.attn_q.weight.lora_b"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"tensors": {A: (8, 2)}}, "only half of the change of 'blk.0.attn_q.weight'"),
        ({"tensors": {A: (8, 2), B: (3, 8)}}, "two halves do not fit"),
        ({"tensors": {}}, "changes nothing"),
        ({"tensors": {A: (8, 2), B: (2, 8), "blk.0.attn_q.weight": (8, 8)}}, "no part of a LoRA"),
        ({"tensors": {A: (8, 2), B: (2, 8)}, "kind": "ia3"}, "only LoRA is"),
        ({"tensors": {A: (8, 2), B: (2, 8)}, "more": _alora}, "aLoRA"),
        ({"tensors": {A: (8, 2), B: (2, 8)}, "more": _wide_alpha}, "no 32-bit float"),
        ({"tensors": {A: (8, 2), B: (2, 8)}, "more": _no_number}, "is no number"),
        ({"tensors": {A: (8, 2), B: (2, 8)}, "dtype": np.int32}, "in I32; adapters are in"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_files_that_are_no_lora(arguments: dict[str, object], problem: str, tmp_path: Path) -> None:
    path = write_pair(tmp_path / "bad.gguf", **arguments)  # type: ignore[arg-type]
    with pytest.raises(BadModelFile, match=problem):
        facts_of(read_header(path, kind="adapter"))


def test_control_vectors_that_are_none(tiny_gguf: Path, tmp_path: Path) -> None:
    for layers, problem in (((0, 1), "direction.0"), ((), "without vectors")):
        path = write_vector(tiny_gguf, tmp_path / "bad.gguf", layers=layers)
        with pytest.raises(BadModelFile, match=problem):
            facts_of(read_header(path, kind="adapter"))


def test_only_what_fits_the_model_is_used_with_it(tiny_gguf: Path, tmp_path: Path) -> None:
    model = read_header(tiny_gguf)
    width = model.n_embd

    def said(path: Path) -> str:
        return misfit(read_header(path, kind="adapter"), model)

    assert said(write_lora(tiny_gguf, tmp_path / "a.gguf")) == ""
    assert said(write_lora(tiny_gguf, tmp_path / "b.gguf", architecture="gemma")) == (
        "is for gemma, and the model is llama"
    )
    wide = {A: (width + 32, 4), B: (4, width)}
    assert f"as one of {width + 32}x{width}, but the model's is {width}x" in said(write_pair(tmp_path / "c.gguf", wide))
    deep = {f"blk.{model.n_layers}.attn_q.weight.lora_{half}": shape for half, shape in
            (("a", (width, 4)), ("b", (4, width)))}  # fmt: skip
    assert "which the model does not have" in said(write_pair(tmp_path / "d.gguf", deep))
    experts = {A: (width, 4, 2), B: (4, width, 2)}
    assert "but the model's is" in said(write_pair(tmp_path / "e.gguf", experts))
    assert said(write_vector(tiny_gguf, tmp_path / "g.gguf")) == ""
    assert said(write_vector(tiny_gguf, tmp_path / "h.gguf", hint="qwen2")) == "is for qwen2, and the model is llama"
    assert said(write_vector(tiny_gguf, tmp_path / "i.gguf", width=width + 1)) == (
        f"has vectors of {width + 1} numbers, and the model's states have {width}"
    )
    assert said(write_vector(tiny_gguf, tmp_path / "j.gguf", layers=(1, model.n_layers))) == (
        f"has a vector for layer {model.n_layers}, and the model's last is {model.n_layers - 1}"
    )


def test_the_table_of_tokens_has_its_halves_the_other_way_round(tiny_gguf: Path, tmp_path: Path) -> None:
    synthesize("tiny-gemma3", "Q4_0", tmp_path / "with an output of its own.gguf")
    for path, problem in ((tmp_path / "with an output of its own.gguf", ""), (tiny_gguf, "its output with as well")):
        model = read_header(path)
        table = {"token_embd.weight.lora_a": (4, model.n_vocab), "token_embd.weight.lora_b": (4, model.n_embd)}
        made = write_pair(tmp_path / "table.gguf", table, architecture=model.architecture)
        said = misfit(read_header(made, kind="adapter"), model)
        assert problem in said
        assert bool(said) == bool(problem)


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "model", "wanted"),
    [
        ("tiny", "tiny", ()),
        ("tiny+style", "tiny", (("style", 1.0),)),
        ("tiny+a=0.5+b=-2+c:latest=.25", "tiny", (("a", 0.5), ("b", -2.0), ("c:latest", 0.25))),
        ("owner/repo@main:Q4_0+style", "owner/repo@main:Q4_0", (("style", 1.0),)),
        ("tiny+owner/lora@v1:x-lora.gguf=0.5", "tiny", (("owner/lora@v1:x-lora.gguf", 0.5),)),
        ("tiny+owner/lora:x-lora.gguf", "tiny", (("owner/lora:x-lora.gguf", 1.0),)),
        ("/a/my+model.gguf", "/a/my+model.gguf", ()),
        ("/a/my+model.gguf+style=2", "/a/my+model.gguf", (("style", 2.0),)),
        ("/a+b/c=d/model.gguf", "/a+b/c=d/model.gguf", ()),
        ("/a/b=.gguf", "/a/b=.gguf", ()),
        ("/a/x+b=1.gguf", "/a/x+b=1.gguf", ()),
        ("/a/x.gguf+owner/lora:y.gguf", "/a/x.gguf+owner/lora:y.gguf", ()),
        ("C:\\models\\a+b.gguf", "C:\\models\\a+b.gguf", ()),
        ("tiny+", "tiny+", ()),
        ("+style", "+style", ()),
        ("tiny+no name", "tiny+no name", ()),
    ],
)
def test_names_with_adapters(text: str, model: str, wanted: tuple[tuple[str, float], ...]) -> None:
    assert split_adapters(text) == AdaptedName(model, wanted)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("tiny+a=101", "the scale 101; the limit is 100"),
        ("tiny+a=100.0000001", "the scale 100.0000001; the limit is 100"),
        ("tiny+a=nan", "the scale 'nan'; write a number"),
        ("tiny+a=1e3", "write a number"),
        ("tiny+a=", "write a number"),
        ("tiny+a+b+a", "asks for 'a' twice"),
        ("tiny" + "".join(f"+a{number}" for number in range(MAX_ADAPTERS + 1)), "more than 8 adapters"),
    ],
)
def test_names_that_ask_for_too_much(text: str, problem: str) -> None:
    with pytest.raises(BadRequest, match=problem) as refused:
        split_adapters(text)
    assert refused.value.field == "model"


@given(st.text(alphabet="ab+=./:@1\\ ", max_size=24))
def test_no_text_means_two_things(text: str) -> None:
    try:
        parts = split_adapters(text)
    except BadRequest:
        return
    written = "".join(f"+{name}" for name, _ in parts.adapters)
    assert len(parts.model) + len(written) <= len(text)
    assert text.startswith(parts.model)


# --- the store --------------------------------------------------------------------------------------------------------


def test_adapters_have_names_like_models(store: Store, tiny_gguf: Path, tmp_path: Path) -> None:
    put(store, "style")
    lora = write_lora(tiny_gguf, tmp_path / "else where.gguf", seed=1)
    named(store, "Terse:v1", lora)
    assert [(each.name, each.path) for each in store.adapters()] == [
        ("style", store.folder / "style.gguf"), ("Terse:v1", lora),
    ]  # fmt: skip
    assert [each.name for each in store.list()] == ["tiny"]
    assert store.damaged() == []
    assert store.adapter("terse:V1", field="x").facts.rank == RANK
    for name in ("style", "Terse:v1"):
        with pytest.raises(BadRequest, match=rf"is no model but an adapter for llama models.*MODEL\+{name}") as refused:
            store.resolve(name.lower())
        assert refused.value.field == "model"
    with pytest.raises(BadRequest, match="'tiny' is no adapter but a model"):
        store.adapter("tiny", field="x")
    with pytest.raises(NotFound, match="adapter 'nothing' not found") as missing:
        store.adapter("nothing", field="lora[0]")
    assert missing.value.field == "lora[0]"
    with pytest.raises(BadModelFile, match="is no adapter but a model"):
        named(store, "wrong", tiny_gguf)


def test_copies_share_the_file_and_the_last_name_takes_it(store: Store, tiny_gguf: Path, tmp_path: Path) -> None:
    content = write_lora(tiny_gguf, tmp_path / "l.gguf").read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    store.blobs.folder.mkdir()
    (store.blobs.folder / f"sha256-{sha256}").write_bytes(content)
    naming.point(store, "style", creation.named_adapter(store, f"sha256:{sha256}", None, licence_text="MIT", now=NOW))
    naming.copy(store, "style", "again")
    base = creation.base_of(store, "tiny", None)
    adapter = creation.adapters(store, base, ["again"], None)[0]  # by its name
    assert (adapter.place, adapter.digest) == (Place.BLOB, f"sha256:{sha256}")
    naming.point(store, "tuned", creation.assemble(base, Changes(adapters=(adapter,)), now=NOW))
    kept = naming.remove(store, "style").kept
    assert kept[0].reason in ("'again' uses it", "'tuned' uses it")
    assert [each.reason for each in naming.remove(store, "again").kept] == ["'tuned' uses it"]
    assert [part.path for part in store.resolve("tuned").parts] == [store.blobs.folder / f"sha256-{sha256}"]
    assert naming.remove(store, "tuned").freed_bytes == len(content)
    assert store.adapters() == []


def test_a_file_that_a_model_uses_is_not_removed(store: Store) -> None:
    put(store, "style")
    base = creation.base_of(store, "tiny", None)
    adapter = creation.adapters(store, base, ["style"], None)[0]
    naming.point(store, "tuned", creation.assemble(base, Changes(adapters=(adapter,)), now=NOW))
    with pytest.raises(Conflict, match="'style' is used by tuned"):
        naming.remove(store, "style")
    with pytest.raises(BadRequest, match="removed one by one"):
        naming.remove(store, "tiny+style")


def test_an_adapter_that_fits_no_model_is_refused_when_one_is_made(store: Store, tiny_gguf: Path) -> None:
    write_lora(tiny_gguf, store.folder / "other.gguf", architecture="gemma")
    base = creation.base_of(store, "tiny", None)
    with pytest.raises(BadModelFile, match=r"other\.gguf cannot be used with 'tiny': it is for gemma"):
        creation.adapters(store, base, ["other"], None)[0]


def test_a_model_has_no_adapter_twice_and_not_too_many(store: Store) -> None:
    names = [f"a{number}" for number in range(MAX_ADAPTERS + 1)]
    for seed, name in enumerate(names):
        put(store, name, seed=seed)
    naming.copy(store, "a0", "again")
    base = creation.base_of(store, "tiny", None)
    own = creation.adapters(store, base, ["a0", "a1"], None)
    naming.point(store, "tuned", creation.assemble(base, Changes(adapters=own), now=NOW))
    tuned = creation.base_of(store, "tuned", None)
    for model, texts in ((base, ["a0", "again"]), (tuned, ["again"])):
        with pytest.raises(BadRequest, match="the adapter 'again' twice"):
            creation.adapters(store, model, texts, None)
    for model, texts in ((base, names), (tuned, names[2:])):
        with pytest.raises(BadRequest, match="would have 9 adapters; the limit is 8"):
            creation.adapters(store, model, texts, None)
    assert len(creation.adapters(store, tuned, names[3:], None)) == MAX_ADAPTERS - 2


def test_an_unsound_adapter_is_listed_with_its_problem(store: Store) -> None:
    write_pair(store.folder / "bad.gguf", {A: (8, 2)})
    (problem,) = store.damaged()
    assert "only half of the change" in problem.problem
    assert store.adapters() == []


# --- what a request means ---------------------------------------------------------------------------------------------


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_name_with_adapters(store: Store) -> None:
    style, terse = put(store, "style"), put(store, "terse", write_vector)
    assert adapters.resolve(store, "tiny").adapters is None
    found = adapters.resolve(store, "tiny:latest+terse=-0.5+style")
    assert found.model.name == "tiny"
    assert found.adapters == (
        (terse, sha256(terse), terse.stat().st_size, -0.5),
        (style, sha256(style), style.stat().st_size, 1.0),
    )
    assert [each.name for each in found.named] == ["terse", "style"]
    assert adapters.resolve(store, "tiny+style=0").adapters == ()


def test_a_list_of_adapters(store: Store, tiny_gguf: Path, tmp_path: Path) -> None:
    style, terse = put(store, "style"), put(store, "terse", seed=1)
    path = write_lora(tiny_gguf, tmp_path / "path.gguf", seed=2)

    def scales(name: str, *wanted: tuple[int | str, float]) -> dict[str, float]:
        asked = [AdapterChoice(key, scale, f"lora[{index}]") for index, (key, scale) in enumerate(wanted)]
        return {each.path.stem: each.scale for each in adapters.resolve(store, name, asked).adapters or ()}

    assert scales("tiny", (1, 0.5), ("style", 2.0)) == {"terse": 0.5, "style": 2.0}
    assert scales("tiny", (f"SHA256:{sha256(terse)}", 1.0), (str(path), 1.0)) == {"terse": 1.0, "path": 1.0}
    assert scales("tiny+style+terse", (0, 0.5)) == {"style": 0.5, "terse": 1.0}
    assert scales("tiny+style", ("style", 0.0)) == {}
    base = creation.base_of(store, "tiny", None)
    own = creation.adapters(store, base, [str(style)], None)[0]
    naming.point(store, "tuned", creation.assemble(base, Changes(adapters=(own,)), now=NOW))
    assert adapters.resolve(store, "tuned").adapters is None
    assert scales("tuned+terse") == {"style": 1.0, "terse": 1.0}
    assert scales("tuned", ("style", 0.0)) == {}


@pytest.mark.parametrize(
    ("name", "wanted", "error", "problem", "field"),
    [
        ("tiny+nothing", (), NotFound, "adapter 'nothing' not found", "model"),
        ("tiny+tiny", (), BadRequest, "'tiny' is no adapter but a model", "model"),
        ("tiny+other", (), BadRequest, "'other' cannot be used with 'tiny': it is for gemma", "model"),
        ("style", (), BadRequest, "'style' is no model but an adapter", "model"),
        ("tiny+style+copy", (), BadRequest, "'copy' is asked for twice", "model"),
        ("tiny", ((2, 1.0), (9, 1.0)), NotFound, "no adapter has the id 9; the last one is 2", "lora[1]"),
        ("tiny", (("nothing", 1.0),), NotFound, "adapter 'nothing' not found", "lora[0]"),
        ("tiny", (("a b", 1.0),), BadRequest, "the adapter's name 'a b' is neither", "lora[0]"),
        ("tiny", (("sha256:" + "0" * 64, 1.0),), NotFound, "no adapter has the digest", "lora[0]"),
        ("tiny", (("style", 1.0), ("style", 2.0)), BadRequest, "'style' is asked for twice", "lora[1]"),
    ],
)
def test_requests_that_cannot_be_met(
    name: str,
    wanted: tuple[tuple[int | str, float], ...],
    error: type[LocalrunError],
    problem: str,
    field: str,
    store: Store,
    tiny_gguf: Path,
) -> None:
    style = put(store, "style")
    shutil.copyfile(style, store.folder / "copy.gguf")
    write_lora(tiny_gguf, store.folder / "other.gguf", architecture="gemma")
    asked = [AdapterChoice(key, scale, f"lora[{index}]") for index, (key, scale) in enumerate(wanted)]
    with pytest.raises(error, match=problem) as refused:
        adapters.resolve(store, name, asked)
    assert refused.value.field == field


def test_too_many_in_all(store: Store) -> None:
    for number in range(MAX_ADAPTERS + 1):
        put(store, f"a{number}", seed=number)
    name = "tiny" + "".join(f"+a{number}" for number in range(MAX_ADAPTERS))
    assert len(adapters.resolve(store, name).adapters or ()) == MAX_ADAPTERS
    with pytest.raises(BadRequest, match="9 adapters are asked for") as refused:
        adapters.resolve(store, name, [AdapterChoice(f"a{MAX_ADAPTERS}", 1.0, "lora[0]")])
    assert refused.value.field == "lora[0]"


def test_a_changed_file_is_another_adapter(store: Store) -> None:
    path = put(store, "style")
    before = adapters.resolve(store, "tiny+style").adapters
    time.sleep(0.01)
    write_lora(builtin.model_path(), path, seed=9)
    after = adapters.resolve(store, "tiny+style").adapters
    assert before
    assert after
    assert before[0].sha256 != after[0].sha256 == sha256(path)


def test_pairs_that_fit(store: Store, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        put(store, name, seed=ord(name))
    write_lora(tiny_gguf, store.folder / "other.gguf", architecture="gemma")
    naming.copy(store, "tiny", "little")

    def listed() -> list[tuple[str, str]]:
        return [(model.name, adapter.name) for model, adapter in adapters.models_and_pairs(store)[1]]

    assert listed() == [("tiny", "a"), ("tiny", "b"), ("little", "a"), ("little", "b")]
    monkeypatch.setattr(adapters, "MAX_PAIRS", 3)
    assert len(listed()) == 3
    assert [model.name for model in adapters.models_and_pairs(store)[0]] == ["tiny", "little"]


# --- Modelfiles -------------------------------------------------------------------------------------------------------


def test_a_modelfile_without_from_names_an_adapter() -> None:
    said = modelfile.parse("ADAPTER ./style.gguf\nLICENSE MIT\n")
    assert said.base is None
    assert said.adapters == (modelfile.Line(1, "./style.gguf"),)
    assert modelfile.parse(modelfile.write(adapters=["./style.gguf"])).base is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("ADAPTER a.gguf\nADAPTER b.gguf", "line 2 of the Modelfile: a second ADAPTER, and there is no FROM"),
        ("ADAPTER a.gguf\nSYSTEM Hi", "line 2 of the Modelfile: SYSTEM, and there is no FROM"),
        ("SYSTEM Hi", "no FROM line"),
    ],
)
def test_modelfiles_of_neither_a_model_nor_an_adapter(text: str, problem: str) -> None:
    with pytest.raises(BadRequest, match=problem):
        modelfile.parse(text)


# --- hostile files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", [write_lora, write_vector])
@settings(max_examples=60 * DEPTH, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_an_adapter_with_anything_changed_is_understood_or_refused(
    data: st.DataObject, write: Callable[..., Path], tiny_gguf: Path, tmp_path: Path
) -> None:
    path = tmp_path / "changed.gguf"
    content = bytearray(write(tiny_gguf, path).read_bytes())
    head = read_header(path, kind="adapter").data_offset
    for _ in range(data.draw(st.integers(1, 4), label="changes")):
        start = data.draw(st.integers(0, head - 9), label="start")
        value = data.draw(st.sampled_from((0, 1, 8, 9, 1 << 31, (1 << 64) - 1)) | st.integers(0, 255), label="value")
        width = data.draw(st.sampled_from((1, 8)), label="width")
        content[start : start + width] = (value % (1 << 8 * width)).to_bytes(width, "little")
    path.write_bytes(content)
    try:
        header = read_named(path)
        if header.kind in ADAPTERS:
            assert isinstance(misfit(header, read_header(tiny_gguf)), str)
    except BadModelFile:
        return


def test_as_many_tensors_as_a_header_may_have(tiny_gguf: Path, tmp_path: Path) -> None:
    n_pairs = MAX_TENSORS // 2
    tensors = {f"blk.{pair}.x.lora_{half}": (1, 1) for pair in range(n_pairs) for half in "ab"}
    header = read_header(write_pair(tmp_path / "many.gguf", tensors), kind="adapter")
    assert facts_of(header).n_layers == n_pairs
    assert "which the model does not have" in misfit(header, read_header(tiny_gguf))
    one_more = tensors | {f"blk.{n_pairs}.x.lora_{half}": (1, 1) for half in "ab"}
    with pytest.raises(BadModelFile, match="the limit is"):
        read_header(write_pair(tmp_path / "more.gguf", one_more), kind="adapter")
