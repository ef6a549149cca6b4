"""The files that a token of a streamed chat runs through in the engine's process are those that the README lists."""

from __future__ import annotations

import json
from pathlib import Path

import localrun.engine
from localrun.wire import Open, Ready, Segment, Submit
from tests.engine.test_process import child
from tests.path_table import listed, name_of

ENGINE = Path(localrun.engine.__path__[0])
# Notes the files in which functions run, in all threads: from the request's frame to the frame with its end.
TRACED = """
import json, sys, threading
from pathlib import Path
from localrun import framing
from localrun.engine import process
from localrun.wire import Step, Submit
paths, is_on = set(), False
def seen(frame, event, value):
    global is_on
    code = frame.f_code
    if is_on and event == "call":
        paths.add(code.co_filename)
    elif event == "return" and code is framing.decoded.__code__:
        is_on = isinstance(value, Submit)
    elif event == "return" and code is framing.encode.__code__:
        message = frame.f_locals["message"]
        is_on = is_on and not (isinstance(message, Step) and any(delta.finish for delta in message.deltas))
threading.setprofile(seen)
sys.setprofile(seen)
code = process.main(process.LLAMA)
sys.setprofile(None)
Path(sys.argv[1]).write_text(json.dumps(sorted(paths)))
sys.exit(code)
"""


def test_the_readme_lists_the_files_of_a_streamed_chat(tiny_gguf: Path, tmp_path: Path):
    opened = Open(
        model_path=str(tiny_gguf), n_slots=4, n_kv_cells=2048, n_batch=256, n_threads=1, n_gpu_layers=0, kv_type="f16",
        target_itl_s=0.14, ram_cache_bytes=1 << 29, max_queue=64, disk_cache_bytes=1 << 30, model="tiny",
        kv_folder=str(tmp_path / "kv"),
    )  # fmt: skip
    segments = (Segment("<|im_start|>user\n", trusted=True), Segment("hello there", trusted=False))
    with child("-c", TRACED, str(tmp_path / "paths.json")) as engine:
        engine.send(opened)
        assert isinstance(engine.receive(), Ready)
        engine.send(Submit(id=1, segments=segments, n_predict=12, ignore_eos=True, client="somebody"))
        assert engine.finals(1)[1].n_output == 12
        assert engine.process.stdin is not None
        engine.process.stdin.close()
        assert engine.exit_code() == 0
    found = {name_of(path, ENGINE) for path in json.loads((tmp_path / "paths.json").read_text())} - {None}
    files = listed(ENGINE, "The path of a token")
    assert found == set(files)
    assert len(files) == len(found) <= 26
