from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from localrun import errors
from localrun.errors import ContextExceeded, LocalrunError, ModelNotFound, QueueFull, by_code


def tree(root: type[LocalrunError] = LocalrunError) -> Iterator[type[LocalrunError]]:
    yield root
    for cls in root.__subclasses__():
        yield from tree(cls)


CLASSES = [cls for cls in tree() if cls.__module__ == errors.__name__]


TREE = """\
LocalrunError (500 internal)
  BadRequest (400 bad_request)
    ContextExceeded (400 context_length_exceeded)
    BadTemplate (422 bad_template)
  Unauthorized (401 unauthorized)
    InvalidKey (401 invalid_api_key)
  Forbidden (403 forbidden)
  NotFound (404 not_found)
    ModelNotFound (404 model_not_found)
  MethodNotAllowed (405 method_not_allowed)
    NoWebSocket (426 no_websocket)
  Conflict (409 conflict)
  TooLarge (413 body_too_large)
  StorageExceeded (413 storage_limit_exceeded)
  UnsupportedMediaType (415 unsupported_media_type)
  BadModelFile (422 bad_model_file)
    NoNumbers (422 no_numbers)
  QueueFull (429 queue_full)
    RateLimited (429 rate_limit_exceeded)
    TooManyFailures (429 too_many_failures)
  Cancelled (499 cancelled)
  EngineFailed (500 engine_failed)
    EngineDied (500 engine_died)
    UnknownToken (500 unknown_token)
  NotSupported (501 not_supported)
  Unavailable (503 unavailable)
    DeviceLost (503 device_lost)
  DownloadFailed (502 download_failed)
    DigestMismatch (502 digest_mismatch)
    SourceChanged (502 source_changed)
    SourceRefused (502 source_refused)
    DiskFull (507 disk_full)
  DiskRefused (500 disk_refused)
  CannotFit (507 cannot_fit)
  PortBusy (exit code 3, never an HTTP answer)
  DaemonUnreachable (exit code 4, raised by clients only)
    UntrustedCertificate (exit code 4)
  ServiceFailed (exit code 1, never an HTTP answer)
"""


def test_the_tree_and_its_codes_are_what_clients_know():
    lines = re.findall(r"^( *)(\w+) \((\d+|exit|exit code \d|raised)?(?: (\w+))?", TREE, re.MULTILINE)
    documented = {name: (len(indent) // 2, status, code) for indent, name, status, code in lines}
    assert set(documented) == {cls.__name__ for cls in CLASSES}
    for cls in CLASSES:
        depth, status, code = documented[cls.__name__]
        assert depth == len(cls.__mro__) - len(LocalrunError.__mro__), f"{cls.__name__} stands under another class"
        if status.isdigit():
            assert (int(status), code) == (cls.status, cls.code)


def test_every_error_has_a_code_of_its_own():
    codes = [cls.code for cls in CLASSES]
    assert len(codes) == len(set(codes))


@pytest.mark.parametrize("cls", CLASSES)
def test_an_error_that_travelled_is_the_same_error_again(cls: type[LocalrunError]):
    error = by_code(cls.code, "what went wrong")
    assert type(error) is cls
    assert error.message == str(error) == "what went wrong"
    assert error.status == cls.status


def test_an_unknown_code_is_an_internal_error_with_its_message():
    error = by_code("from_the_future", "something")
    assert type(error) is LocalrunError
    assert error.message == "something"


def test_messages_name_the_numbers_and_the_way_out():
    too_long = ContextExceeded(5000, 4096)
    assert (too_long.n_prompt, too_long.n_ctx) == (5000, 4096)
    for part in ("5000", "4096", "--kv-cells"):
        assert part in str(too_long)
    assert "localrun list" in str(ModelNotFound("nobody"))
    assert ModelNotFound("nobody").field == "model"
    assert QueueFull("full", retry_after_s=2.5).retry_after_s == 2.5


def test_a_model_that_was_not_found_has_its_name_also_after_it_travelled():
    for name in ("qwen3:8b", "/models/it's one.gguf"):
        there = ModelNotFound(name)
        here = by_code(there.code, there.message)
        assert isinstance(here, ModelNotFound)
        assert (here.name, there.name) == (name, name)
    there = ModelNotFound("gpt:cloud", "it runs\nelsewhere")
    here = by_code(there.code, there.message)
    assert isinstance(here, ModelNotFound)
    assert (here.name, here.reason, here.message) == ("gpt:cloud", "it runs\nelsewhere", there.message)
    told_otherwise = by_code(ModelNotFound.code, "not for this key")
    assert isinstance(told_otherwise, ModelNotFound)
    assert told_otherwise.name == ""
