"""Pulling adapters from a loopback hub and a loopback registry."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from localrun.errors import BadModelFile, BadRequest, NotFound
from localrun.models import adapters, builtin, naming
from localrun.models.gguf.header import FileKind
from localrun.models.storage.manifest import Place, Role
from tests.hub.repository import Repository
from tests.hub.server import Hub as LoopbackHub
from tests.lora_file import write_lora, write_vector
from tests.models.test_pull import GGUF, Machine
from tests.registry import Layer, Registry

pytestmark = pytest.mark.skipif(not GGUF, reason="the built-in model's file is not there")


@pytest.fixture
def lora(tmp_path: Path) -> bytes:
    return write_lora(builtin.model_path(), tmp_path / "lora.gguf").read_bytes()


def test_a_repository_of_adapters(tmp_path: Path, lora: bytes) -> None:
    vector = write_vector(builtin.model_path(), tmp_path / "vector.gguf").read_bytes()
    with LoopbackHub(
        Repository("org/style-lora", {"style-lora-f16.gguf": lora}),
        Repository("org/happy", {"happy.gguf": vector}),
        Repository("org/both", {"model-Q8_0.gguf": GGUF, "lora-model.gguf": lora}),
    ) as hub:
        machine = Machine(tmp_path / "machine", hub.endpoint)
        for name, kind in (
            ("hf.co/org/style-lora", FileKind.ADAPTER),
            ("org/style-lora:style-lora-f16.gguf", FileKind.ADAPTER),
            ("org/happy", FileKind.CONTROL_VECTOR),
            ("org/both:lora-model.gguf", FileKind.ADAPTER),
        ):
            said = machine.pull(name)
            assert [(file.role, file.place) for file in said.files] == [(Role.ADAPTER, Place.HUB)]
            adapter = machine.store.adapter(name, field="model")
            assert (adapter.facts.kind, adapter.facts.architecture) == (kind, "llama")
            assert f"sha256:{adapter.sha256}" == said.files[0].digest
            found = adapters.resolve(machine.store, f"tiny+{name}=0.5").adapters
            assert found is not None
            assert [(each.path, each.scale) for each in found] == [(adapter.path, 0.5)]
        # Without a file's name a repository is that of a model, if it has one.
        assert [file.role for file in machine.pull("org/both").files] == [Role.MODEL]
        with pytest.raises(NotFound, match=r"has no 'lora-other\.gguf'"):
            machine.pull("org/both:lora-other.gguf")
        assert naming.remove(machine.store, "org/happy").freed_bytes == len(vector)
        with pytest.raises(NotFound):
            machine.store.adapter("org/happy", field="model")


def test_a_registry_s_model_with_an_adapter(tmp_path: Path, lora: bytes) -> None:
    wrong = write_lora(builtin.model_path(), tmp_path / "wrong.gguf", architecture="gemma").read_bytes()
    spoiled = write_lora(builtin.model_path(), tmp_path / "spoiled.gguf", strength=math.nan).read_bytes()
    machine = Machine(tmp_path / "machine")
    with Registry() as registry:
        machine.pull(tuned := registry.add("library/tuned", Layer("model", GGUF), Layer("adapter", lora)))
        assert len(machine.store.resolve(tuned).adapters) == 1
        name = registry.add("library/broken", Layer("model", GGUF), Layer("adapter", wrong))
        with pytest.raises(BadModelFile, match="is for gemma, and the model is llama"):
            machine.pull(name)
        name = registry.add("library/spoiled", Layer("model", GGUF), Layer("adapter", spoiled))
        with pytest.raises(BadModelFile, match=r"NaN or infinite numbers .*\.lora_b"):
            machine.pull(name)
        with pytest.raises(BadRequest, match="is no adapter but a model"):
            machine.store.adapter(tuned, field="model")
