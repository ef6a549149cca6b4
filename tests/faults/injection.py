"""Faults inside the program's own processes, for what cannot be done to them from outside: `shim/sitecustomize.py`.

faults = Injected(tmp_path)
with running_daemon(**faults.environment) as daemon:
    faults.plan(what="disk", root=str(models_folder(daemon)), at=3, errno=errno.EIO)
    ...
    assert faults.n_met
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

_SHIM = Path(__file__).parent / "shim"


class Injected:
    """What goes wrong in the processes that were started with `environment`, from now on and until `end`."""

    def __init__(self, folder: Path, **constants: Any) -> None:
        """`constants` are values of modules' constants, by `module__CONSTANT` with dots as double underscores."""
        self._path = folder / "faults.json"
        by_module: dict[str, dict[str, Any]] = {}
        for name, value in constants.items():
            *module, constant = name.split("__")
            by_module.setdefault(".".join(module), {})[constant] = value
        path = os.pathsep.join(filter(None, [str(_SHIM), os.environ.get("PYTHONPATH", "")]))
        self.environment = {
            "PYTHONPATH": path,
            "LOCALRUN_FAULTS": str(self._path),
            "LOCALRUN_FAULTS_CONSTANTS": json.dumps(by_module),
        }

    def plan(self, **fault: Any) -> None:
        """As `shim/sitecustomize.py` says; it takes the place of the one before."""
        self._met.unlink(missing_ok=True)
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(fault))
        new.replace(self._path)

    def end(self) -> None:
        """Nothing goes wrong any more. How often it did stays."""
        self._path.unlink(missing_ok=True)

    @property
    def n_met(self) -> int:
        """How often the present fault was met."""
        return self._met.stat().st_size if self._met.exists() else 0

    @property
    def _met(self) -> Path:
        return self._path.with_name(f"{self._path.name}.met")
