"""What a service takes over from the shell that installs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from localrun.config import FIELDS, Folders, env_name
from localrun.errors import BadRequest
from localrun.service.manager import ServicePlan, left_out, make_plan, taken_over

FOLDERS = Folders(Path("/h/data"), Path("/h/cache"), Path("/h/config"), Path("/h/state"))


def plan(flags: dict[str, object] | None = None, environ: dict[str, str] | None = None) -> ServicePlan:
    return make_plan(
        python="/py", flags=flags or {}, environ=environ or {}, folders=FOLDERS,
        models_folder=Path("/h/data/models"), hub_cache=Path("/h/hub"), shell_folder=Path("/shell"),
    )  # fmt: skip


def test_only_flags_that_were_given_become_flags():
    assert plan().command == ("/py", "-P", "-m", "localrun", "serve")
    assert plan({"host": None, "port": 1234}).command[-2:] == ("--port", "1234")
    assert plan({"kv_cells": 4096}).command[-2:] == ("--kv-cells", "4096")


def test_every_setting_has_its_variable_taken_over():
    assert {env_name(field) for field in FIELDS} <= set(taken_over())
    environ = {
        "LOCALRUN_SLOTS": "3",
        "HF_HUB_OFFLINE": "1",
        "https_proxy": "http://p:3128",
        "EDITOR": "vi",
        "HF_HOME": "",
    }
    assert plan(environ=environ).environment == {
        "LOCALRUN_SLOTS": "3", "HF_HUB_OFFLINE": "1", "https_proxy": "http://p:3128",
    }  # fmt: skip


def test_relative_paths_mean_what_they_meant_in_the_shell():
    environ = {
        "LOCALRUN_HOME": "home", "LOCALRUN_MODELS": "/models", "HF_HOME": "~/hf", "LOCALRUN_MODEL_DIRS": "a:/b:~/c",
        "LOCALRUN_ORIGINS": "app",
    }  # fmt: skip
    assert plan(environ=environ).environment == {
        "LOCALRUN_HOME": "/shell/home", "LOCALRUN_MODELS": "/models", "HF_HOME": "~/hf",
        "LOCALRUN_MODEL_DIRS": "/shell/a:/b:~/c", "LOCALRUN_ORIGINS": "app",
    }  # fmt: skip


def test_tokens_stay_out_and_are_named():
    environ = {"HF_TOKEN": "secret", "HF_TOKEN_PATH": "/h/token"}
    assert plan(environ=environ).environment == {"HF_TOKEN_PATH": "/h/token"}
    assert list(left_out(environ)) == ["HF_TOKEN"]
    assert left_out({}) == {}


@pytest.mark.parametrize("name", ["HTTPS_PROXY", "http_proxy", "ALL_PROXY", "HF_ENDPOINT"])
@pytest.mark.parametrize("address", ["http://me:pass@p:3128", "http://token@p", "me:pass@p:3128"])
def test_addresses_with_passwords_stay_out_and_are_named(name: str, address: str):
    assert plan(environ={name: address, "NO_PROXY": "localhost"}).environment == {"NO_PROXY": "localhost"}
    assert "without a user's name and password" in left_out({name: address})[name]
    assert plan(environ={name: "http://p:3128"}).environment == {name: "http://p:3128"}


def test_folders_within_others_are_not_listed():
    assert plan().written == (Path("/h/data"), Path("/h/cache"), Path("/h/config"), Path("/h/state"), Path("/h/hub"))


def test_a_newline_is_refused_by_name():
    with pytest.raises(BadRequest, match="LOCALRUN_MODELS holds a control character"):
        plan(environ={"LOCALRUN_MODELS": "/models\nExecStartPre=/bin/evil"})
