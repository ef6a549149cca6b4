"""Search for GGUF repositories on the Hugging Face hub."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from localrun.errors import Unavailable
from localrun.models.sources.hub import Hub

if TYPE_CHECKING:
    from huggingface_hub import HfApi, ModelInfo


@dataclass(frozen=True, kw_only=True)
class HubHit:
    """A repository that `search` found."""

    repo: str
    n_downloads: int
    n_likes: int
    updated_at: datetime | None
    is_gated: bool
    licence: str
    tags: tuple[str, ...]


async def search(query: str, *, hub: Hub, limit: int = 20) -> list[HubHit]:
    """GGUF repositories that match, the most downloaded first. Raises as `Hub.asked` does; Unavailable when offline."""
    if hub.is_offline:
        raise Unavailable("HF_HUB_OFFLINE is set, so the hub cannot be searched; unset it")
    return await hub.asked(lambda api: _search(query, api, limit))


def _search(query: str, api: HfApi, limit: int) -> list[HubHit]:
    found = api.list_models(
        search=query,
        filter="gguf",
        sort="downloads",
        limit=limit,
        expand=["downloads", "likes", "gated", "lastModified", "tags"],
    )
    return [
        HubHit(
            repo=info.id,
            n_downloads=info.downloads or 0,
            n_likes=info.likes or 0,
            updated_at=info.last_modified,
            is_gated=bool(info.gated),
            licence=licence_of(info),
            tags=tuple(info.tags or ()),
        )
        for info in itertools.islice(found, limit)
    ]


def licence_of(info: ModelInfo) -> str:
    """The short name that the repository's card gives, which the hub also lists among the tags."""
    tags = [tag.removeprefix("license:") for tag in info.tags or () if tag.startswith("license:")]
    return tags[0] if tags else ""
