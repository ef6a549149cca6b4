"""What `/api/tags` and `/api/show` tell of adapters, for which Ollama's API has no place: they are no models, so they
stand in a list of their own, and most of what is said of one is under `localrun`.

Does not: read or hash weights for a list.
"""

from __future__ import annotations

from typing import Any

import msgspec

from localrun.models import modelfile
from localrun.models.storage.model import NamedAdapter


class AdapterTag(msgspec.Struct, frozen=True, kw_only=True):
    """One adapter that is here. `kind` is `adapter` or `control vector`, `architecture` that of the models that it is
    for, "" where a control vector does not say. `rank` is 0 for a control vector. `digest` is that of the content, ""
    where it was not needed yet."""

    name: str
    kind: str
    architecture: str
    rank: int
    modified_at: str
    size: int
    digest: str
    source: str


def tag_of(adapter: NamedAdapter, source: str) -> AdapterTag:
    """`source` is where it came from, in a few words."""
    facts = adapter.facts
    return AdapterTag(
        name=adapter.name,
        kind=facts.kind,
        architecture=facts.architecture,
        rank=facts.rank,
        modified_at=adapter.modified_at.isoformat(),
        size=adapter.size_bytes,
        digest=adapter.file.digest,
        source=source,
    )


def more_of(adapter: NamedAdapter) -> dict[str, Any]:
    """`localrun` of `/api/show`. Raises BadModelFile when the file is gone."""
    facts = adapter.facts
    return {
        "name": adapter.name,
        "kind": facts.kind,
        "path": str(adapter.path),
        "size": adapter.size_bytes,
        "digest": f"sha256:{adapter.sha256}",
        "source": msgspec.to_builtins(adapter.source),
        "architecture": facts.architecture,
        "rank": facts.rank,
        "alpha": facts.alpha,
        "base_model": facts.base,
        "layers": facts.n_layers,
        "tensors": len(adapter.header.tensors),
    }


def modelfile_of(adapter: NamedAdapter, where: str) -> str:
    return modelfile.write(adapters=[where], licence=adapter.manifest.licence_text if adapter.manifest else "")
