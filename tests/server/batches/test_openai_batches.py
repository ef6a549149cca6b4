"""OpenAI's files and batches, by OpenAI's client, on a real daemon with fake engines."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from openai import OpenAI

from tests.daemon import Daemon, running_daemon
from tests.models.handmade import TYPE_F32, file_bytes, tensor
from tests.server.batches.batch_files import begun, chat_line, client_of, encoded, ended, lines_of, until


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon() as running:
        yield running


@pytest.fixture(scope="module")
def slow() -> Iterator[Daemon]:
    with running_daemon(LOCALRUN_FAKE_STEP_MS="20") as running:
        yield running


@pytest.fixture
def client(daemon: Daemon) -> OpenAI:
    return client_of(daemon)


def test_a_file_is_kept_as_it_was_sent_listed_in_pages_and_deleted(client: OpenAI):
    content = bytes(range(256)) * 9000  # more than a piece
    files = [client.files.create(file=(f"{n}.bin", content), purpose="user_data") for n in range(3)]
    assert client.files.content(files[0].id).read() == content
    assert (files[0].bytes, files[0].filename, files[0].status) == (len(content), "0.bin", "processed")
    page = client.files.list(limit=2, purpose="user_data", order="asc")
    assert [file.id for file in page.data] == [file.id for file in files[:2]]
    assert page.has_next_page()
    assert [file.id for file in client.files.list(limit=2, purpose="user_data", order="asc")] == [f.id for f in files]
    for file in files:
        assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(files[0].id)


def test_what_is_no_form_or_lacks_a_field_is_refused_and_leaves_nothing(daemon: Daemon, client: OpenAI):
    before = sorted((daemon.home / "data" / "batches").glob("blobs/*"))
    bad = (
        ({"files": {"file": ("a", b"x")}, "data": {"purpose": "nonsense"}}, "purpose"),
        ({"files": {"other": ("a", b"x")}, "data": {"purpose": "batch"}}, "file"),
    )
    for form, field in bad:
        refused = daemon.http.post("/v1/files", **form)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
    headers = {"content-type": "multipart/form-data; boundary=b"}
    for body in (
        b"--b\r\n",
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nabc',
        b"no form",
    ):
        assert daemon.http.post("/v1/files", content=body, headers=headers).status_code == 400
    assert daemon.http.post("/v1/files", json={}).status_code == 415
    assert sorted((daemon.home / "data" / "batches").glob("blobs/*")) == before


def test_every_line_has_its_answer_and_failed_ones_are_in_the_error_file(client: OpenAI):
    lines = [chat_line(f"r{n}") for n in range(20)] + [chat_line("bad", temperature=-1), chat_line("cut", stream=True)]
    batch = ended(client, begun(client, encoded(lines), metadata={"who": "me"}))
    assert (batch.status, batch.model, batch.metadata) == ("completed", "tiny", {"who": "me"})
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"completed": 20, "failed": 2, "total": 22}
    output = lines_of(client, batch.output_file_id)
    assert [line["custom_id"] for line in output] == [f"r{n}" for n in range(20)]
    assert all(line["error"] is None and line["response"]["status_code"] == 200 for line in output)
    answers = [line["response"]["body"] for line in output]
    assert batch.usage is not None
    assert batch.usage.output_tokens == sum(answer["usage"]["completion_tokens"] for answer in answers) == 80
    errors = {line["custom_id"]: line["response"] for line in lines_of(client, batch.error_file_id)}
    assert errors["bad"]["body"]["error"]["param"] == "temperature"
    assert errors["cut"]["body"]["error"]["param"] == "stream"
    same = client.chat.completions.create(**lines[0]["body"], temperature=0)
    again = ended(client, begun(client, encoded([chat_line("r0", temperature=0)])))
    body = lines_of(client, again.output_file_id)[0]["response"]["body"]
    assert body["choices"][0]["message"]["content"] == same.choices[0].message.content


def test_an_input_that_is_not_as_it_must_be_fails_with_the_number_of_each_line(client: OpenAI):
    good = chat_line("a")
    content = b"".join(
        [encoded([good]), b"{no json\n", b"\n", encoded([good]), encoded([{**chat_line("b"), "method": "GET"}]),
         encoded([{**chat_line("c"), "url": "/v1/embeddings"}]), encoded([{"custom_id": "d"}]),
         encoded([chat_line("e", model="nobody")])]
    )  # fmt: skip
    batch = ended(client, begun(client, content))
    assert batch.status == "failed"
    assert batch.errors is not None
    assert [(error.line, error.code) for error in batch.errors.data or ()] == [
        (2, "invalid_json_line"),
        (4, "duplicate_custom_id"),
        (5, "invalid_method"),
        (6, "invalid_url"),
        (7, "missing_required_parameter"),
        (8, "mismatched_model"),
    ]
    missing = ended(client, begun(client, encoded([chat_line("a", model="nobody")])))
    assert [error.code for error in (missing.errors and missing.errors.data) or ()] == ["model_not_found"]
    empty = ended(client, begun(client, b"\n"))
    assert [error.code for error in (empty.errors and empty.errors.data) or ()] == ["empty_file"]


def test_inputs_as_other_programs_write_them(client: OpenAI):
    one, two = encoded([chat_line("a")]), encoded([chat_line("b")])
    windows = b"\xef\xbb\xbf" + one.rstrip() + b"\r\n\r\n  \r\n" + two.rstrip()
    for content in (windows, b"\n" + one + b"\n\n" + two + b"\n", one + two.replace(b"hello", "\u2028\x85".encode())):
        batch = ended(client, begun(client, content))
        found = [line["custom_id"] for line in lines_of(client, batch.output_file_id)]
        assert (batch.status, found) == ("completed", ["a", "b"])
    batch = ended(client, begun(client, one + two.replace(b"hello", b"hell\xff")))
    (refused,) = lines_of(client, batch.error_file_id)
    assert (refused["custom_id"], refused["response"]["status_code"]) == ("b", 400)
    for content, code in (((one + two).decode().encode("utf-16"), "invalid_file_format"),
                          (one + two.replace(b'"b"', b'"\xff"'), "invalid_json_line"),
                          (one + bytes(99) + b"\n", "invalid_json_line")):  # fmt: skip
        batch = ended(client, begun(client, content))
        assert batch.errors is not None
        assert [error.code for error in batch.errors.data or ()] == [code]


def test_a_model_that_does_not_fit_holds_its_own_batch_and_no_other(daemon: Daemon, client: OpenAI):
    n_wide = 1 << 20
    huge = file_bytes(tensors=(tensor("token_embd.weight", (n_wide, n_wide), TYPE_F32, 0),), data=b"")
    path = daemon.home / "huge.gguf"
    path.write_bytes(huge)
    os.truncate(path, len(huge) + 4 * n_wide * n_wide)
    held = begun(client, encoded([chat_line("a", model=str(path))]))
    rows = lambda: {row["id"]: row for row in daemon.http.get("/localrun/v1/snapshot").json()["batches"]}  # noqa: E731
    until(lambda: "weights 4398.0 GB" in rows().get(held.id, {"waits_for": ""})["waits_for"])  # once it is read
    batch = ended(client, begun(client, encoded([chat_line(f"r{n}") for n in range(30)])))
    assert batch.status == "completed"
    assert rows().keys() == {held.id}
    page = daemon.http.get("/metrics").text
    for line in ("localrun_batches 1.0", "localrun_batches_waiting 1.0", "localrun_batch_lines_left 1.0"):
        assert f"\n{line}\n" in page
    client.batches.cancel(held.id)
    assert ended(client, held).status == "cancelled"
    path.unlink()


def test_lines_and_batches_are_counted_by_what_became_of_them(daemon: Daemon, client: OpenAI):
    def counted() -> dict[str, float]:
        page = daemon.http.get("/metrics").text
        found = re.findall(r'^localrun_batch\w+_total\{\w+="(\w+)"\} ([0-9.]+)$', page, re.M)
        return {name: float(number) for name, number in found}

    before = counted()
    ended(client, begun(client, encoded([*(chat_line(f"r{n}") for n in range(3)), chat_line("bad", temperature=-1)])))
    ended(client, begun(client, b"no line"))
    after = counted()
    found = {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}
    assert found == {"succeeded": 3, "errored": 1, "completed": 1, "failed": 1}


def test_a_batch_of_what_cannot_be_one_is_refused_at_once(client: OpenAI):
    content = encoded([chat_line("a")])
    for fields, field in (({"endpoint": "/v1/moderations"}, "endpoint"), ({"window": "soon"}, "completion_window")):
        with pytest.raises(openai.BadRequestError) as refused:
            begun(client, content, **fields)
        assert refused.value.param == field
    with pytest.raises(openai.NotFoundError):
        client.batches.create(input_file_id="file-none", endpoint="/v1/embeddings", completion_window="24h")


def test_a_cancelled_batch_keeps_what_it_has_and_says_so_of_the_rest(slow: Daemon):
    client = client_of(slow)
    batch = begun(client, encoded([chat_line(f"r{n}") for n in range(500)]))
    until(lambda: _n_completed(client, batch.id) >= 3)
    with pytest.raises(openai.ConflictError):
        client.files.delete(batch.input_file_id)
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = ended(client, batch)
    assert batch.status == "cancelled"
    output, errors = lines_of(client, batch.output_file_id), lines_of(client, batch.error_file_id)
    assert sorted(line["custom_id"] for line in output + errors) == sorted(f"r{n}" for n in range(500))
    assert len(output) == _n_completed(client, batch.id) >= 3
    assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)


def test_a_batch_expires_with_what_it_has(slow: Daemon):
    client = client_of(slow)
    batch = ended(client, begun(client, encoded([chat_line(f"r{n}", n_tokens=50) for n in range(500)]), window="2s"))
    assert (batch.status, batch.expired_at is not None) == ("expired", True)
    output, errors = lines_of(client, batch.output_file_id), lines_of(client, batch.error_file_id)
    assert len(output) + len(errors) == 500
    assert {line["error"]["code"] for line in errors} == {"batch_expired"}


def test_lines_run_in_the_batch_lane_and_batches_take_turns(slow: Daemon):
    client = client_of(slow)
    both = [begun(client, encoded([chat_line(f"r{n}") for n in range(400)])) for _ in range(2)]
    until(lambda: all(_n_completed(client, batch.id) > 0 for batch in both))
    rows = slow.http.get("/localrun/v1/requests").json()["requests"]
    assert {row["lane"] for row in rows if row["client"] in {batch.id for batch in both}} == {"batch"}
    for batch in both:
        client.batches.cancel(batch.id)
        ended(client, batch)


def test_a_batch_gives_its_room_to_whoever_asks_for_another_model(models_dir: Path):
    """It keeps its place, and waits until nobody has asked for a while."""
    with running_daemon(LOCALRUN_MODELS=str(models_dir), LOCALRUN_MAX_MODELS="1", LOCALRUN_FAKE_STEP_MS="20") as daemon:
        client = client_of(daemon)
        lines = [chat_line(f"r{n}", model="alpha", n_tokens=500) for n in range(50)]
        batch = begun(client, encoded([chat_line("quick", model="alpha"), *lines]))
        until(lambda: _n_completed(client, batch.id) >= 1)
        answer = daemon.post("/v1/completions", model="beta", prompt="a", max_tokens=2)
        assert answer.status_code == 200
        assert "unloading alpha" in daemon.log, "only one has room"
        assert client.batches.retrieve(batch.id).status == "in_progress"
        client.batches.cancel(batch.id)
        batch = ended(client, batch)
        both = lines_of(client, batch.output_file_id) + lines_of(client, batch.error_file_id)
        assert len({line["custom_id"] for line in both}) == len(both) == 51


def test_the_other_endpoints(client: OpenAI):
    asked = {
        "/v1/completions": {"model": "tiny", "prompt": "a", "max_tokens": 2},
        "/v1/responses": {"model": "tiny", "input": "a", "max_output_tokens": 16},
        "/v1/embeddings": {"model": "tiny", "input": ["a", "b"]},
    }
    for endpoint, body in asked.items():
        line = {"custom_id": "one", "method": "POST", "url": endpoint, "body": body}
        batch = ended(client, begun(client, encoded([line]), endpoint=endpoint))
        assert [line["response"]["status_code"] for line in lines_of(client, batch.output_file_id)] == [200], endpoint


def _n_completed(client: OpenAI, batch_id: str) -> int:
    counts = client.batches.retrieve(batch_id).request_counts
    assert counts is not None
    return counts.completed


def test_whoever_asks_beside_a_batch_waits_for_no_line_of_it(slow: Daemon):
    """All of them are answered before any line is: lines make room in the slots, and are not waited for."""
    client = client_of(slow)
    lines = [chat_line(f"r{n}", n_tokens=1500, ignore_eos=True) for n in range(8)]
    batch = begun(client, encoded(lines))

    def n_decoding() -> int:
        rows = slow.http.get("/localrun/v1/requests").json()["requests"]
        return sum(row["client"] == batch.id and row["state"] == "decode" for row in rows)

    until(lambda: n_decoding() >= 1)
    with ThreadPoolExecutor(8) as several:
        asked = [several.submit(client.chat.completions.create, **chat_line(f"x{n}")["body"]) for n in range(8)]
        answers = [one.result() for one in asked]
    assert len(answers) == 8
    assert _n_completed(client, batch.id) == 0
    client.batches.cancel(batch.id)
    ended(client, batch)
