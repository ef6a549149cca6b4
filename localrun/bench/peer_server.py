"""The other side of a comparison: llama-server, with the flags that say the same as ours.

Its default for everything else stands: flash attention, batch sizes, prompt cache in RAM. Slots are stated, so its KV
is split among them unless `is_unified`, and both are worth measuring: neither is better at everything.
"""

from __future__ import annotations

from pathlib import Path

from localrun.bench.server_flags import ServerFlags
from localrun.bench.server_process import ServerProcess

SPLIT_NAME = "llama-server"
UNIFIED_NAME = "llama-server -kvu"


def peer_server(binary: Path, flags: ServerFlags, log_folder: Path, *, is_unified: bool) -> ServerProcess:
    """A llama-server on a free port; not started yet."""
    command = [str(binary), "--model", str(flags.model), "--host", "127.0.0.1", "--no-ui", "--offline"]
    command += ["--parallel", str(flags.slots), "--ctx-size", str(flags.kv_cells)]
    command += ["--threads", str(flags.threads), "--threads-batch", str(flags.threads)]
    command += ["--kv-unified" if is_unified else "--no-kv-unified"]
    name = UNIFIED_NAME if is_unified else SPLIT_NAME
    log_name = "llama-server-unified.log" if is_unified else "llama-server-split.log"
    return ServerProcess(name, command, str(flags.model), log_folder / log_name)
