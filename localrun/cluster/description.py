"""What an app of the cluster is: a model by the contents of its files, and how it is loaded. All of its replicas are
opened by one description, on whatever node, so that a stream can go on on any of them.

Does not: say where replicas run, or fetch files: a node needs the model under the same name, with the same contents.
"""

from __future__ import annotations

import hashlib
import re

import msgspec

from localrun import __version__
from localrun.cluster.scaling import Scale
from localrun.config import NOTHING_ASKED, LoadSettings
from localrun.errors import Conflict
from localrun.models.storage.blobs import hash_file
from localrun.models.storage.model import Model
from localrun.models.storage.store import Store


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """`contents` is of all files that an engine opens. `n_gpus` is for each replica, a part of one for less. Without
    `scale` there are as many replicas as were asked for."""

    model: str
    contents: str
    load: LoadSettings = NOTHING_ASKED
    n_gpus: float = 0.0
    scale: Scale | None = None

    @property
    def fingerprint(self) -> str:
        """What a door and a replica must agree on. Other versions of localrun may compute otherwise."""
        said = msgspec.json.encode((__version__, self.model, self.contents, self.load), order="sorted")
        return hashlib.sha256(said).hexdigest()

    @property
    def app(self) -> str:
        """The name that Serve has for it: the same for every description of this model."""
        return app_name(self.model)


def app_name(model: str) -> str:
    digest = hashlib.sha256(model.encode()).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9.-]', '_', model)}-{digest}"


def contents_of(store: Store, model: Model) -> str:
    """A digest over the contents of all files that an engine opens of it. Reads what the store does not know by its
    content. Raises OSError, and Conflict for a file that is being written."""
    known = {}
    if model.manifest is not None:
        known = {store.path_of(file): file.digest for file in model.manifest.files if file.digest}
    whole = hashlib.sha256()
    for path in model.files:
        whole.update((known.get(path) or hash_file(path)).encode("ascii"))
    return whole.hexdigest()


def described(store: Store, name: str, load: LoadSettings, n_gpus: float, scale: Scale | None = None) -> Description:
    """Of a model of this machine. Raises what the store raises for the name, and Conflict."""
    model = store.resolve(name)
    return Description(model=model.name, contents=contents_of(store, model), load=load, n_gpus=n_gpus, scale=scale)


def found(store: Store, description: Description) -> Model:
    """The model that is described, on this machine. Reads its files. Raises what the store raises for the name, and
    Conflict for another one of this name."""
    model = store.resolve(description.model)
    if contents_of(store, model) != description.contents:
        raise Conflict(
            f"'{description.model}' is here with other contents than the cluster's; copy that file, or pull it again"
        )
    return model
