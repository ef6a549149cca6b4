"""The other side of a comparison: llama-server with the flags that say what ours say, and a model for both."""

from __future__ import annotations

from pathlib import Path

from localrun.bench.servers import ServerFlags, ServerProcess
from tests.support.synthesis.synthesize import synthesize

SPLIT_NAME = "llama-server"
UNIFIED_NAME = "llama-server -kvu"
# llama-server's flag for drafts from what it has read and written.
SPECULATION = "--spec-default"


def model_or_random(model: Path | None, folder: Path) -> Path:
    """The model; without one, a GGUF in `folder` with the size and speed of a 135M in Q4_0, whose text is noise."""
    if model is not None:
        return model
    path = folder / "135m-q4_0.gguf"
    synthesize("135m", "Q4_0", path)
    return path


def peer_server(
    binary: Path, flags: ServerFlags, log_folder: Path, *, is_unified: bool, drafts: bool = False
) -> ServerProcess:
    """A llama-server on a free port; not started yet.

    Its default for everything else stands: flash attention, batch sizes, prompt cache in RAM. Slots are stated, so its
    KV is split among them unless `is_unified`, and both are worth measuring: neither is better at everything. It
    speculates only where it `drafts`, and then in the way that it calls the default.
    """
    command = [str(binary), "--model", str(flags.model), "--host", "127.0.0.1", "--no-ui", "--offline"]
    command += ["--parallel", str(flags.slots), "--ctx-size", str(flags.kv_cells)]
    command += ["--threads", str(flags.threads), "--threads-batch", str(flags.threads)]
    command += ["--kv-unified" if is_unified else "--no-kv-unified"]
    name = UNIFIED_NAME if is_unified else SPLIT_NAME
    if drafts:
        command.append(SPECULATION)
        name = f"{name} {SPECULATION}"
    log_name = f"llama-server-{'unified' if is_unified else 'split'}{'-drafts' if drafts else ''}.log"
    return ServerProcess(name, command, str(flags.model), log_folder / log_name)
