"""Prints the GPUs that llama.cpp sees, as JSON: `python -m localrun.engine.tools.gpu_report`.

A process of its own, because loading the native library and waking a GPU's driver is not for the daemon. Ends at once.
"""

from __future__ import annotations

import json


def main() -> None:
    """A list of `[name, free_bytes, is_shared, total_bytes]`; empty where this build can use no GPU."""
    from localrun.engine.native.library import gpus

    print(json.dumps(gpus()))


if __name__ == "__main__":
    main()
