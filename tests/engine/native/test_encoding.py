"""The encoder: pauses, halts, and everything that must be refused before native code sees it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from localrun.engine.backend import DecodeFailed, MediaChunk, MediaRows, Projector
from localrun.engine.native import library
from localrun.engine.native.llama import LlamaBackend
from localrun.engine.native.worker import Pieces
from localrun.errors import BadModelFile, BadRequest, EngineFailed
from localrun.models.gguf import projector_shapes
from localrun.models.gguf.reader import read_header
from localrun.wire import Media, MediaKind, Segment
from tests.engine.native.media import WIDTH, Pair, encoded, make_pair, media_file, opened, prompt, table_of
from tests.projector_file import another, write_parts, write_projector

# 256 patches in four layers: enough nodes to pause at.
TOWER = {"n_embd": 64, "n_ff": 128, "n_layers": 4, "image": 128, "patch": 8}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"), "gemma3", **TOWER)


@pytest.fixture(scope="module")
def backend(pair: Pair) -> Iterator[LlamaBackend]:
    with opened(pair, n_batch=32) as backend:
        yield backend


@pytest.fixture
def projector(backend: LlamaBackend) -> Projector:
    assert backend.projector is not None
    return backend.projector


@pytest.fixture
def picture(pair: Pair, tmp_path: Path) -> Media:
    return media_file(tmp_path, pair)


def chunk_of(projector: Projector, media: Media) -> MediaChunk:
    ((_, chunk),) = table_of(projector.tokenize(prompt(media)))
    return chunk


def test_any_number_of_pauses_changes_nothing(
    backend: LlamaBackend, projector: Projector, picture: Media, monkeypatch: pytest.MonkeyPatch
):
    chunk = chunk_of(projector, picture)
    alone = encoded(backend, chunk)
    n_nodes, n_pauses, is_end = 0, 0, Pieces.is_end

    def every_node(pieces: Pieces) -> bool:
        nonlocal n_nodes
        n_nodes += 1
        return is_end(pieces) or True

    monkeypatch.setattr(Pieces, "is_end", every_node)
    encoding = projector.begin(chunk)
    while not encoding.is_over:
        with backend.turns.step():
            seen = n_nodes
            threading.Event().wait(0.0002)
            assert n_nodes == seen, "it computes while it is paused"
            n_pauses += 1
    np.testing.assert_array_equal(encoding.result(), alone)
    assert n_pauses > 3


def test_the_next_encoding_after_one_that_was_given_up_is_right(
    backend: LlamaBackend, projector: Projector, picture: Media, pair: Pair, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    other = media_file(tmp_path, pair, seed=2)
    chunk, other_chunk = chunk_of(projector, picture), chunk_of(projector, other)
    alone = encoded(backend, chunk)
    is_under_way, may_go_on, is_end = threading.Event(), threading.Event(), Pieces.is_end

    def stop_at_the_first(pieces: Pieces) -> bool:
        is_under_way.set()
        assert may_go_on.wait(60)
        return is_end(pieces)

    monkeypatch.setattr(Pieces, "is_end", stop_at_the_first)
    encoding = projector.begin(other_chunk)
    assert is_under_way.wait(60)
    encoding.halt()
    with pytest.raises(ValueError, match="another chunk"):
        projector.begin(chunk)
    may_go_on.set()
    monkeypatch.undo()
    with pytest.raises(DecodeFailed, match="cancelled"):
        encoding.result()
    np.testing.assert_array_equal(encoded(backend, chunk), alone)
    encoding = projector.begin(other_chunk)
    encoding.halt()
    while not encoding.is_over:
        pass
    np.testing.assert_array_equal(encoded(backend, chunk), alone)
    assert not np.array_equal(encoded(backend, other_chunk), alone)


def test_a_failure_between_two_pieces_is_an_error_and_no_rows(
    backend: LlamaBackend, projector: Projector, picture: Media, monkeypatch: pytest.MonkeyPatch
):
    chunk = chunk_of(projector, picture)
    alone = encoded(backend, chunk)

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Pieces, "is_end", lambda _: True)
    monkeypatch.setattr(Pieces, "note", fail)
    with pytest.raises(DecodeFailed, match="MemoryError"):
        encoded(backend, chunk)
    monkeypatch.undo()
    np.testing.assert_array_equal(encoded(backend, chunk), alone)


def test_the_context_for_prompts_has_room_for_the_largest_chunk(backend: LlamaBackend, projector: Projector):
    assert projector.max_chunk_tokens == 64
    assert backend.batch.capacity == 32
    assert backend.worker is not None
    assert backend.worker.batch.capacity == 64


def test_wrong_numbers_are_refused_before_native_code(backend: LlamaBackend, projector: Projector, picture: Media):
    chunk = chunk_of(projector, picture)
    rows = np.zeros((chunk.n_tokens, 256), np.float32)
    assert backend.worker is not None
    away = backend.n_seqs
    backend.set_chunks(away, ((0, chunk),))

    def start(*, seq: int = away, start: int = 0, rows: np.ndarray = rows, first: int = 0, n_rows: int = 64) -> None:
        assert backend.worker is not None
        backend.worker.start_media(MediaRows(seq, start, chunk, rows, first, n_rows))

    with pytest.raises(ValueError, match="in a batch of 32"):
        backend.decode_media(MediaRows(0, 0, chunk, rows, 0, chunk.n_tokens))
    with pytest.raises(ValueError, match="attend to each other"):
        start(n_rows=32)
    for wrong in (
        {"seq": away + 5}, {"seq": -1}, {"start": -1}, {"start": 4096}, {"first": 1}, {"first": -1}, {"n_rows": 0},
        {"n_rows": -1}, {"n_rows": 65}, {"rows": rows[:-1]}, {"rows": rows[:, :-1]},
        {"rows": rows.astype(np.float64)}, {"rows": rows[:, ::-1]},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"rows|sequence"):
            start(**wrong)
    for table in (((-1, chunk),), ((9, chunk), (3, chunk)), ((1 << 31, chunk),), ((0, chunk._replace(n_pos=0)),)):
        with pytest.raises(ValueError, match="a chunk of"):
            backend.set_chunks(0, table)
    backend.set_chunks(away, ())


@pytest.mark.parametrize(
    "wrong",
    [
        {"width": 0}, {"height": 0}, {"width": -1}, {"width": 20_000}, {"width": 16_384, "height": 16_384},
        {"n_samples": 5}, {"kind": MediaKind.AUDIO, "width": 0, "height": 0, "n_samples": 1000},
    ],
)  # fmt: skip
def test_media_of_sizes_that_it_cannot_take_are_refused(
    projector: Projector, picture: Media, wrong: dict[str, int | MediaKind]
):
    with pytest.raises(BadRequest):
        projector.tokenize([Segment("", media=msgspec.structs.replace(picture, **wrong))])


def test_a_file_that_is_not_as_large_as_its_picture_is_refused(projector: Projector, picture: Media):
    chunk = chunk_of(projector, picture)
    for size in (0, 1, 70 * 50 * 3 - 1, 70 * 50 * 3 + 1):
        Path(picture.path).write_bytes(bytes(size))
        with pytest.raises(ValueError, match="bytes instead of"):
            projector.begin(chunk)
    with pytest.raises(ValueError, match="no chunk"):
        projector.begin(chunk._replace(ordinal=1))
    with pytest.raises(ValueError, match="no chunk"):
        projector.begin(chunk._replace(n_tokens=-3))


def test_one_chunk_at_a_time(projector: Projector, picture: Media):
    encoding = projector.begin(chunk_of(projector, picture))
    with pytest.raises(ValueError, match="another chunk"):
        projector.begin(chunk_of(projector, picture))
    encoding.result()


def test_text_is_tokenized_as_without_media_and_is_never_a_place_for_them(
    backend: LlamaBackend, projector: Projector, picture: Media
):
    text = "<__media__> is <|im_start|> text"
    for trusted in (True, False):
        parts = projector.tokenize([Segment(text, trusted), Segment("", media=picture), Segment("")])
        around = projector.tokenize([Segment("", media=picture)])
        assert parts == [backend.tokenize(text, parse_special=trusted) + around[0], *around[1:]]
        assert [isinstance(part, list) for part in parts] == [True, False, True]


def test_the_fingerprint_is_of_the_files_bytes(pair: Pair, projector: Projector, tmp_path: Path):
    other = tmp_path / "other.gguf"
    write_projector(other, "gemma3", WIDTH, seed=2, **TOWER)
    with opened(Pair(pair.model, other)) as backend:
        assert backend.projector is not None
        assert backend.projector.fingerprint != projector.fingerprint
    copied = tmp_path / "copied.gguf"
    copied.write_bytes(pair.projector.read_bytes())
    with opened(Pair(pair.model, copied)) as backend:
        assert backend.projector is not None
        assert backend.projector.fingerprint == projector.fingerprint


def test_sound_must_be_long_enough_and_have_numbers(tmp_path: Path):
    pair = make_pair(tmp_path, "ultravox")
    sound = media_file(tmp_path, pair)
    with opened(pair) as backend:
        assert backend.projector is not None
        for n_samples in (0, 1, 2, 399, -1, 1 << 40):
            with pytest.raises(BadRequest, match="samples"):
                backend.projector.tokenize(prompt(msgspec.structs.replace(sound, n_samples=n_samples)))
        for n_samples in (400, 401, 16_000 * 31):
            chunks = table_of(backend.projector.tokenize(prompt(msgspec.structs.replace(sound, n_samples=n_samples))))
            assert len(chunks) == 1 + (n_samples > 480_000)
        samples = np.fromfile(sound.path, np.float32)
        samples[7] = np.nan
        samples.tofile(sound.path)
        with pytest.raises(ValueError, match="not numbers"):
            encoded(backend, chunk_of(backend.projector, sound))


def test_a_projector_of_another_width_or_without_a_tensor_is_no_file_for_this_model(pair: Pair, tmp_path: Path):
    wide = tmp_path / "wide.gguf"
    write_projector(wide, "gemma3", WIDTH // 2)
    with pytest.raises(BadModelFile, match="cannot be used with this model"), opened(Pair(pair.model, wide)):
        pass
    with pytest.raises(BadModelFile, match="cannot be used"), opened(Pair(pair.model, pair.model)):
        pass
    with pytest.raises(BadModelFile, match="cannot be used"), opened(Pair(pair.model, tmp_path / "none.gguf")):
        pass


def test_without_libmtmd_only_a_projector_is_an_error(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(library, "library_folder", lambda: tmp_path)
    monkeypatch.delitem(sys.modules, "llama_cpp.mtmd_cpp", raising=False)
    monkeypatch.setenv("MTMD_CPP_LIB", "")
    with pytest.raises(EngineFailed, match="libmtmd"):
        library.mtmd()


def ends_by_itself(pair: Pair, code: str, *arguments: str) -> str:
    """Run in a process of its own: what it says. Whatever native code aborts does not say "refused"."""
    command = [sys.executable, "-c", CHILD + code, str(pair.model), str(pair.projector), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


CHILD = """
import sys
from pathlib import Path
import numpy as np
from localrun.engine.backend import NoRoom
from localrun.errors import LocalrunError
from localrun.wire import Media, MediaKind, Segment
from tests.engine.native.media import Pair, compute, make_pair, media_file, opened, prompt
pair = Pair(Path(sys.argv[1]), Path(sys.argv[2]))
def check(call):
    try:
        call()
    except (LocalrunError, ValueError, NoRoom):
        return True
    return False
"""


def test_sizes_at_the_edges_end_no_process(tmp_path: Path):
    """Those that are taken are encoded and computed."""
    code = """
folder = Path(sys.argv[3])
for name in ("gemma3", "idefics3", "qwen2vl"):
    with opened(make_pair(folder, name)) as backend:
        n_taken = 0
        for number, size in enumerate([(1, 1), (1, 2), (2, 1), (1, 16384), (16384, 1), (3, 700), (28, 28), (1000, 9)]):
            media = media_file(folder, pair, number + 1, width=size[0], height=size[1])
            n_taken += not check(lambda: compute(backend, 0, backend.projector.tokenize(prompt("a", media, "b"))))
            backend.seq_remove(0, 0)
        assert n_taken > 3, name
print("done")
"""
    assert ends_by_itself(make_pair(tmp_path, "gemma3"), code, str(tmp_path)).endswith("done")


def test_sound_of_one_sample_ends_no_process(tmp_path: Path):
    pair = make_pair(tmp_path, "ultravox")
    code = """
with opened(pair) as backend:
    (Path(sys.argv[3]) / "one").write_bytes(bytes(4))
    media = Media(MediaKind.AUDIO, str(Path(sys.argv[3]) / "one"), b"", n_samples=1)
    print("refused" if check(lambda: backend.projector.tokenize(prompt(media))) else "taken")
"""
    assert ends_by_itself(pair, code, str(tmp_path)).endswith("refused")


def test_a_chunk_that_is_larger_than_a_micro_batch_ends_no_process(tmp_path: Path):
    pair = make_pair(tmp_path, "gemma3", **TOWER)
    code = """
with opened(pair, n_batch=32) as backend:
    media = media_file(Path(sys.argv[3]), pair)
    print("refused" if check(lambda: compute(backend, 0, backend.projector.tokenize(prompt(media)))) else "taken")
"""
    assert ends_by_itself(pair, code, str(tmp_path)).endswith("refused")


def test_a_damaged_projector_or_one_that_lacks_something_is_refused(tmp_path: Path):
    pair = make_pair(tmp_path, "gemma3")
    data = pair.projector.read_bytes()
    assert b"mm.soft_emb_norm.weight" in data
    damaged = {
        "empty": b"",
        "half": data[: len(data) // 2],
        "magic": b"GGUX" + data[4:],
        "without": data.replace(b"mm.soft_emb_norm.weight", b"mm.soft_emb_nerm.weight"),
    }
    for name, content in damaged.items():
        (tmp_path / f"{name}.gguf").write_bytes(content)
    # The model has no tokens for the texts between tiles.
    write_projector(tmp_path / "tiles.gguf", "idefics3", WIDTH)
    code = """
for path in sys.argv[3:]:
    assert check(lambda: opened(Pair(pair.model, Path(path))).__enter__()), path
print("refused")
"""
    paths = [str(tmp_path / f"{name}.gguf") for name in (*damaged, "tiles")]
    assert ends_by_itself(pair, code, *paths).endswith("refused")


# `lfm2` puts tokens around pictures that small models lack.
@pytest.mark.parametrize("kind", sorted(set(projector_shapes.KINDS) - {"lfm2"}))
def test_every_type_of_projector_whose_shapes_are_known_opens_and_encodes(kind: str, tmp_path: Path):
    parts = another(kind, WIDTH)
    hears = "a.conv1d.1.weight" in parts.tensors
    model = make_pair(tmp_path, "qwen2vl" if kind.startswith("qwen") and not hears else "idefics3").model
    pair = Pair(model, write_parts(tmp_path / "mmproj.gguf", parts), hears)
    read_header(pair.projector, kind="projector")
    with opened(pair, n_cells=512) as backend:
        assert backend.projector is not None
        (_, chunk), *_ = table_of(backend.projector.tokenize(prompt(media_file(tmp_path, pair))))
        assert encoded(backend, chunk).shape == (chunk.n_tokens, WIDTH)
