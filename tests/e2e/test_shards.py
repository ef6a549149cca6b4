"""A model in several files, behind links as the hub's cache has them, answers as the same model in one."""

from __future__ import annotations

from pathlib import Path

from localrun.models import builtin
from tests.daemon import running_daemon
from tests.models.test_shards import split_copy


def test_a_split_model_behind_links_answers_as_the_whole_one(tmp_path: Path):
    blobs, models = tmp_path / "blobs", tmp_path / "models"
    blobs.mkdir()
    models.mkdir()
    split_copy(builtin.model_path(), blobs)
    for number, file in enumerate(sorted(blobs.iterdir())):
        (models / file.name).symlink_to(file.rename(blobs / str(number)))
    with running_daemon(fake=False, LOCALRUN_MODELS=str(models)) as daemon:
        names = [row["name"] for row in daemon.http.get("/api/tags").json()["models"]]
        (split_name,) = set(names) - {"tiny:latest"}
        options = {"temperature": 0, "num_predict": 8}
        texts = {
            daemon.post("/api/generate", model=name, prompt="Once upon", stream=False, options=options).json()[
                "response"
            ]
            for name in ("tiny", split_name)
        }
        assert len(texts) == 1
        assert texts != {""}
