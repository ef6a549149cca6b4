"""llama-server's own routes, with real weights: the built-in model, whose answers the other APIs give as well."""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import gguf
import pytest

import localrun
from localrun.models import builtin
from tests.daemon import Daemon, running_daemon

GREEDY: dict[str, Any] = {"temperature": 0, "n_predict": 8}
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon("--speculation", "off", fake=False) as running:
        yield running


def ask(daemon: Daemon, path: str, **fields: Any) -> Any:
    answer = daemon.post(path, {"model": "tiny"} | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(daemon: Daemon, path: str, **fields: Any) -> str:
    answer = daemon.post(path, {"model": "tiny"} | fields)
    assert answer.status_code == 400, answer.text
    return str(answer.json()["error"]["field"])


def tokens_of(daemon: Daemon, text: str) -> list[int]:
    tokens = ask(daemon, "/tokenize", content=text)["tokens"]
    assert tokens
    return list(tokens)


def events_of(daemon: Daemon, **fields: Any) -> list[dict[str, Any]]:
    with daemon.http.stream("POST", "/completion", json={"model": "tiny", "stream": True} | fields) as response:
        lines = list(response.iter_lines())
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


def test_a_completion_says_what_another_api_says(daemon: Daemon) -> None:
    other = daemon.post("/v1/completions", model="tiny", prompt=PROMPT, max_tokens=8, temperature=0).json()
    answer = ask(daemon, "/completion", prompt=PROMPT, **GREEDY, return_tokens=True, n_probs=2)
    assert answer["content"] == other["choices"][0]["text"]
    assert answer["stop"] is True
    assert answer["stop_type"] == "limit"
    assert answer["tokens_predicted"] == len(answer["tokens"]) == len(answer["completion_probabilities"]) == 8
    assert answer["tokens_evaluated"] == other["usage"]["prompt_tokens"]
    assert ask(daemon, "/detokenize", tokens=answer["tokens"])["content"] == answer["content"]
    for token, chosen in zip(answer["tokens"], answer["completion_probabilities"], strict=True):
        assert chosen["id"] == token == chosen["top_logprobs"][0]["id"]
        assert chosen["logprob"] == chosen["top_logprobs"][0]["logprob"] >= chosen["top_logprobs"][1]["logprob"]
    assert answer["generation_settings"]["temperature"] == 0
    assert answer["generation_settings"]["top_k"] == 40, "llama-server's own default"
    assert answer["prompt"] == PROMPT
    assert answer["timings"]["predicted_n"] == 8
    assert ask(daemon, "/completions", prompt=PROMPT, **GREEDY)["content"] == answer["content"]


def test_a_stream_is_the_same_in_pieces(daemon: Daemon) -> None:
    whole = ask(daemon, "/completion", prompt=PROMPT, **GREEDY, return_tokens=True)
    *pieces, last = events_of(daemon, prompt=PROMPT, **GREEDY, n_probs=1, timings_per_token=True)
    assert "".join(piece["content"] for piece in pieces) == whole["content"]
    assert [token for piece in pieces for token in piece["tokens"]] == whole["tokens"]
    assert not any(piece["stop"] for piece in pieces)
    assert all(piece["completion_probabilities"] for piece in pieces)
    assert pieces[-1]["timings"]["predicted_n"] == 8
    assert (last["stop"], last["content"], last["stop_type"]) == (True, "", "limit")


def told_while_running(daemon: Daemon, path: str, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": "tiny", "stream": True, "return_progress": True, "timings_per_token": True} | fields
    with daemon.http.stream("POST", path, json=body) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


LONG = "the quick brown fox jumps over the lazy dog " * 60


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/completion", {"prompt": "a " + LONG, "n_predict": 4}),
        ("/v1/completions", {"prompt": "b " + LONG, "max_tokens": 4}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "c " + LONG}], "max_tokens": 4}),
        ("/v1/responses", {"input": "d " + LONG, "max_output_tokens": 4}),
    ],
)
def test_a_stream_tells_how_far_it_is(daemon: Daemon, path: str, fields: dict[str, Any]) -> None:
    """From what the cache had to the whole prompt; the timings grow with it."""
    for is_known in (False, True):
        events = told_while_running(daemon, path, **fields, temperature=0, ignore_eos=True)
        during = [event for event in events if "prompt_progress" in event]
        progress = [event["prompt_progress"] for event in during]
        total, n_cached = progress[0]["total"], progress[0]["cache"]
        assert {(each["total"], each["cache"]) for each in progress} == {(total, n_cached)}
        processed = [each["processed"] for each in progress]
        assert (processed[0], processed[-1]) == (n_cached, total)
        assert processed == sorted(set(processed)), "each step once"
        assert (n_cached > 100) is is_known
        assert progress[0]["time_ms"] == 0
        first, *others = [event["timings"] for event in events if event.get("timings")]
        assert (first["prompt_n"], first["prompt_ms"], first["predicted_n"]) == (0, 0, 0)
        assert all(value is not None and value >= 0 for each in (first, *others) for value in each.values())
        assert [each["prompt_n"] for each in others[len(during) - 1 :]] == [total - n_cached] * (
            len(others) - len(during) + 1
        )
        assert others[-1]["predicted_n"] == 4
        assert len(others) - len(during) >= 3, "each chunk with text has them"


def test_a_stream_tells_nothing_that_was_not_asked_for(daemon: Daemon) -> None:
    fields = {"return_progress": False, "timings_per_token": False, "messages": [{"role": "user", "content": "hi"}]}
    events = told_while_running(daemon, "/v1/chat/completions", **fields)
    assert not any("prompt_progress" in event for event in events)
    assert [event for event in events if event.get("timings")] == events[-1:]


def test_the_slot_of_an_answer_is_known_at_its_end(daemon: Daemon) -> None:
    for number in range(6):
        answer = ask(daemon, "/completion", prompt=f"{PROMPT} {number}", temperature=0, n_predict=1)
        assert answer["id_slot"] >= 0
        settings = answer["generation_settings"]
        assert (settings["adaptive_target"], settings["adaptive_decay"]) == (-1, 0.9)


def test_a_prompt_in_every_form(daemon: Daemon) -> None:
    expected = ask(daemon, "/completion", prompt=PROMPT, **GREEDY)
    ids = ask(daemon, "/tokenize", content=PROMPT, add_special=True)["tokens"]
    for prompt in (ids, [*ids[:2], ask(daemon, "/detokenize", tokens=ids[2:])["content"]]):
        answer = ask(daemon, "/completion", prompt=prompt, **GREEDY)
        assert (answer["content"], answer["tokens_evaluated"]) == (expected["content"], expected["tokens_evaluated"])
    several = ask(daemon, "/completion", prompt=[PROMPT, ids], **GREEDY)
    assert [one["content"] for one in several] == [expected["content"]] * 2
    assert [one["index"] for one in several] == [0, 1]
    for prompt in ("", [], [[]], [[1], 2], ["", "a"]):
        assert refused(daemon, "/completion", prompt=prompt) == "prompt"
    assert refused(daemon, "/completion", prompt=[10**6]) == "prompt"


def test_a_prompt_that_is_not_to_be_cached_has_nothing_of_the_cache_and_leaves_nothing(daemon: Daemon) -> None:
    def n_cached(text: str, **fields: Any) -> int:
        return int(ask(daemon, "/completion", prompt=text, n_predict=1, **fields)["timings"]["cache_n"])

    kept, other = ("A tale of many words, which is long enough to be kept. " * 3, "Another one, just as long. " * 5)
    assert n_cached(kept) == 0
    assert n_cached(kept) > 16
    assert n_cached(kept, cache_prompt=False) == 0
    assert n_cached(kept, cache_prompt=True) > 16
    assert n_cached(other, cache_prompt=False) == n_cached(other, cache_prompt=False) == n_cached(other) == 0
    chat = {"model": "tiny", "messages": [{"role": "user", "content": kept}], "max_tokens": 1}
    usages = [
        daemon.post("/v1/chat/completions", chat | fields).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        for fields in ({}, {}, {"cache_prompt": False})
    ]
    assert usages[1] > 16
    assert usages[2] == 0


def test_what_ends_an_answer(daemon: Daemon) -> None:
    text = ask(daemon, "/completion", prompt=PROMPT, **GREEDY)["content"]
    word = text.split()[2]
    answer = ask(daemon, "/completion", prompt=PROMPT, **GREEDY, stop=[word])
    assert (answer["stop_type"], answer["stopping_word"]) == ("word", word)
    assert word not in answer["content"]
    picked = ask(daemon, "/completion", prompt=PROMPT, **GREEDY, response_fields=["content", "timings/predicted_n"])
    assert picked == {"content": text, "timings/predicted_n": 8}


@pytest.mark.parametrize(("limit", "is_truncated"), [(3, False), (-1, True), (10**6, True)])
def test_an_answer_that_the_context_ended_is_truncated(limit: int, is_truncated: bool) -> None:
    with running_daemon("--kv-cells", "256", "--slots", "1", fake=False) as small:
        answer = ask(small, "/completion", prompt=PROMPT, n_predict=limit, ignore_eos=True)
    assert (answer["stop_type"], answer["truncated"]) == ("limit", is_truncated)
    assert (answer["tokens_predicted"] == limit) is not is_truncated


def test_more_alternatives_than_openai_allows(daemon: Daemon) -> None:
    answer = ask(daemon, "/completion", prompt=PROMPT, n_predict=1, n_probs=100)
    (chosen,) = answer["completion_probabilities"]
    assert len(chosen["top_logprobs"]) == 100


def test_biases_of_tokens_and_of_texts(daemon: Daemon) -> None:
    first = ask(daemon, "/completion", prompt=PROMPT, temperature=0, n_predict=1, return_tokens=True)
    (token,), piece = first["tokens"], first["content"]
    for bias in ([[token, False]], [[piece, -100]], {str(token): False}, {piece: -100.0}):
        answer = ask(daemon, "/completion", prompt=PROMPT, temperature=0, n_predict=1, logit_bias=bias,
                     return_tokens=True)  # fmt: skip
        assert answer["tokens"] != first["tokens"]
    for bias in ([[10**6, 1]], [[1, True]], [[1, 1e9]]):
        assert refused(daemon, "/completion", prompt=PROMPT, logit_bias=bias).startswith("logit_bias")
    for bias in ({"x" * 1_001: 1}, {f"{at} once upon a time there was a": 1 for at in range(1_000)}):
        assert refused(daemon, "/completion", prompt=PROMPT, logit_bias=bias) == "logit_bias", "texts count by tokens"


def test_tokens_that_end_answers_are_banned_where_they_are_not_to_count(daemon: Daemon) -> None:
    biases = [
        ask(daemon, "/completion", prompt=PROMPT, n_predict=1, ignore_eos=wanted, logit_bias={"5": 1})[
            "generation_settings"
        ]["logit_bias"]
        for wanted in (True, False)
    ]
    assert biases[1] == [{"token": 5, "bias": 1.0}]
    assert biases[0][0] == biases[1][0]
    assert len(biases[0]) > 1
    assert all(entry["bias"] is None for entry in biases[0][1:])


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}]}),
    ],
)
def test_biases_have_the_same_forms_on_every_route(daemon: Daemon, path: str, fields: dict[str, Any]) -> None:
    def said(**more: Any) -> str:
        (choice,) = ask(daemon, path, **fields, temperature=0, max_tokens=1, **more)["choices"]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])

    first = said()
    (token,) = tokens_of(daemon, first)
    other = said(logit_bias={str(token): -100})
    assert other != first
    for bias in ([[token, False]], [[token, -100]], {first: False}, [[first, -100]]):
        assert said(logit_bias=bias) == other
    for wrong in ([[token, True]], [[10**6, 1]], [[-1, 1]], [[token]], {"": 1}, {"x" * 1_001: 1}):
        assert daemon.post(path, {"model": "tiny", "logit_bias": wrong} | fields).status_code == 400


def test_samplers_that_are_left_out_are_off(daemon: Daemon) -> None:
    with_all = {"top_k": 1, "temperature": 5, "seed": 1, "n_predict": 6, "prompt": PROMPT}
    greedy = ask(daemon, "/completion", **GREEDY | {"n_predict": 6}, prompt=PROMPT)["content"]
    assert ask(daemon, "/completion", **with_all)["content"] == greedy
    assert ask(daemon, "/completion", **with_all, samplers=["temperature"])["content"] != greedy
    answer = daemon.post("/completion", {"model": "tiny", "samplers": ["temperature", "top_k"]} | with_all)
    assert answer.headers["x-localrun-ignored"] == "samplers"
    # SillyTavern's list, of which each version of llama-server knows a part.
    all_there_were = ["penalties", "top_k", "typical_p", "tfs_z", "temperature", "adaptive_p"]
    answer = daemon.post("/completion", {"model": "tiny", "samplers": all_there_were} | with_all)
    assert (answer.json()["content"], answer.headers["x-localrun-ignored"]) == (greedy, "samplers")
    assert ask(daemon, "/completion", **with_all, samplers="kt")["content"] == greedy
    assert ask(daemon, "/completion", **with_all, samplers="pt")["content"] != greedy
    assert ask(daemon, "/completion", **with_all, samplers="kz")["content"] == greedy


@pytest.mark.parametrize(
    "fields",
    [
        {"post_sampling_probs": True}, {"dynatemp_range": -0.5}, {"adaptive_target": 0.3}, {"min_keep": 3},
        {"t_max_predict_ms": 10}, {"grammar_lazy": True}, {"n_indent": 2}, {"dry_multiplier": -1}, {"dry_base": 0.5},
        {"xtc_probability": 2}, {"xtc_threshold": -0.1}, {"top_n_sigma": 1000}, {"dry_allowed_length": -1},
        {"dry_penalty_last_n": -2}, {"n_probs": 1000},
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_its_name(daemon: Daemon, fields: dict[str, Any]) -> None:
    assert refused(daemon, "/completion", prompt=PROMPT, **fields) == next(iter(fields))


@pytest.mark.parametrize("breakers", [["a\0b"], [""], ["x" * 41], ["x"] * 17])
def test_breakers_that_are_none(daemon: Daemon, breakers: list[str]) -> None:
    assert refused(daemon, "/completion", prompt=PROMPT, dry_sequence_breakers=breakers).startswith("dry_sequence")


def test_tokens_and_back(daemon: Daemon) -> None:
    text = "Once, wörld 😀"
    tokens = tokens_of(daemon, text)
    assert ask(daemon, "/detokenize", tokens=tokens)["content"] == text
    pieces = ask(daemon, "/tokenize", content=text, with_pieces=True)["tokens"]
    assert [piece["id"] for piece in pieces] == tokens
    whole = b"".join(one.encode() if isinstance(one := piece["piece"], str) else bytes(one) for piece in pieces)
    assert whole.decode() == text
    assert any(isinstance(piece["piece"], list) for piece in pieces), "a character of several tokens"
    assert ask(daemon, "/tokenize", content=["Once", 5, 6])["tokens"] == [*tokens_of(daemon, "Once"), 5, 6]
    assert ask(daemon, "/tokenize")["tokens"] == []
    assert ask(daemon, "/detokenize")["content"] == ""
    assert refused(daemon, "/detokenize", tokens=[10**6]) == "tokens"


def test_tokens_by_vllms_names(daemon: Daemon) -> None:
    """What lm-eval asks for, which never names a model."""
    tokens = tokens_of(daemon, "Once, wörld")
    answer = ask(daemon, "/tokenize", prompt="Once, wörld", add_special_tokens=False, return_token_strs=True)
    assert (answer["tokens"], answer["count"]) == (tokens, len(tokens))
    assert "".join(answer["token_strs"][:2]) == "Once,"[: len("".join(answer["token_strs"][:2]))]
    assert answer["max_model_len"] > 0
    with_bos = ask(daemon, "/tokenize", prompt="Once, wörld")["tokens"]
    assert with_bos == ask(daemon, "/tokenize", content="Once, wörld", add_special=True)["tokens"]
    assert ask(daemon, "/detokenize", tokens=tokens)["prompt"] == "Once, wörld"
    info = daemon.http.get("/tokenizer_info?model=tiny").json()
    assert ask(daemon, "/tokenize", content=info["eos_token"])["tokens"]
    assert "messages" in info["chat_template"]
    assert daemon.http.get("/tokenizer_info?model=none-such").status_code == 404
    assert refused(daemon, "/tokenize", prompt="a", content="b") == "prompt"


def test_many_tokens_are_all_there(daemon: Daemon) -> None:
    text = "fox " * 30_000
    tokens = tokens_of(daemon, text)
    assert len(tokens) > 20_000
    assert ask(daemon, "/detokenize", tokens=tokens)["content"] == text
    pieces = ask(daemon, "/tokenize", content=text, with_pieces=True)["tokens"]
    assert "".join(one["piece"] for one in pieces) == text


def test_a_prompt_as_an_object(daemon: Daemon) -> None:
    expected = ask(daemon, "/completion", prompt=PROMPT, **GREEDY)["content"]
    for prompt in ({"prompt_string": PROMPT}, {"content": [{"type": "text", "text": PROMPT}]}):
        assert ask(daemon, "/completion", prompt=prompt, **GREEDY)["content"] == expected
        assert [one["content"] for one in ask(daemon, "/completion", prompt=[prompt, PROMPT], **GREEDY)] == [
            expected
        ] * 2
    assert refused(daemon, "/completion", prompt={}) == "prompt"
    no_place = {"prompt_string": "x", "multimodal_data": ["aGk="]}
    assert refused(daemon, "/completion", prompt=no_place) == "prompt.prompt_string"


def test_control_tokens_only_where_they_are_wanted(daemon: Daemon) -> None:
    name = "<|im_end|>"
    (token,) = ask(daemon, "/tokenize", content=name)["tokens"]
    assert len(ask(daemon, "/tokenize", content=name, parse_special=False)["tokens"]) > 1
    assert ask(daemon, "/detokenize", tokens=[token])["content"] == name


def test_a_template_is_applied_and_nothing_is_generated(daemon: Daemon) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    prompt = ask(daemon, "/apply-template", messages=messages)["prompt"]
    chat = daemon.post("/api/chat", model="tiny", messages=messages, stream=False, _debug_render_only=True).json()
    assert prompt == chat["_debug_info"]["rendered_template"]


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}])
@pytest.mark.parametrize("n", [1, 2])
def test_an_answer_has_the_prompt_that_the_model_got_where_it_is_wanted(
    daemon: Daemon, fields: dict[str, Any], n: int
) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "n": n, "max_tokens": 3} | fields
    prompt = ask(daemon, "/apply-template", messages=body["messages"])["prompt"]
    for verbose, wanted in ((True, {"prompt": prompt}), (False, None)):
        answer = daemon.post("/v1/chat/completions", model="tiny", verbose=verbose, **body)
        chunks = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if "{" in line]
        assert [chunk["__verbose"] for chunk in chunks if "__verbose" in chunk][:1] == ([wanted] if wanted else [])


def test_a_template_goes_on_with_the_assistant_and_leaves_the_opening_out(daemon: Daemon) -> None:
    asked = {"role": "user", "content": "hi"}

    def applied(*messages: dict[str, str], **fields: Any) -> str:
        return str(ask(daemon, "/apply-template", messages=messages, **fields)["prompt"])

    opened, closed = applied(asked), applied(asked, add_generation_prompt=False)
    assert opened.startswith(closed)
    assert len(opened) > len(closed)
    begun = {"role": "assistant", "content": "Whill"}
    assert applied(asked, begun) == opened + "Whill"
    assert applied(asked, begun, add_generation_prompt=True).startswith(opened + "Whill")
    assert applied(asked, begun, add_generation_prompt=True).count("assistant") == 2 * opened.count("assistant")


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict"])
def test_the_limit_of_an_answer_has_four_names_on_every_route(daemon: Daemon, name: str) -> None:
    """One that is not known costs the whole context."""
    messages = [{"role": "user", "content": "hi"}]
    for limit in (1, 3):
        assert ask(daemon, "/completion", prompt=PROMPT, **{name: limit})["tokens_predicted"] == limit
        for path, prompt in (("/v1/completions", {"prompt": PROMPT}), ("/v1/chat/completions", {"messages": messages})):
            answer = ask(daemon, path, **prompt, **{name: limit}, ignore_eos=True)
            assert answer["usage"]["completion_tokens"] == limit
            assert answer["choices"][0]["finish_reason"] == "length"
        answer = ask(daemon, "/v1/responses", input="hi", **{name: limit}, ignore_eos=True)
        assert (answer["usage"]["output_tokens"], answer["max_output_tokens"]) == (limit, limit)
    assert ask(daemon, "/v1/chat/completions", messages=messages, **{name: -1})["choices"][0]["finish_reason"] == "stop"
    assert refused(daemon, "/completion", prompt=PROMPT, **{name: -2}) == name


@pytest.mark.parametrize("n_predict", [0, 1])
def test_rates_of_no_time_are_numbers(daemon: Daemon, n_predict: int) -> None:
    timings = ask(daemon, "/completion", prompt=PROMPT, n_predict=n_predict)["timings"]
    assert (timings["predicted_per_token_ms"], timings["predicted_per_second"]) == (0, 0)
    assert None not in timings.values()


def test_no_wanted_fields_are_all(daemon: Daemon) -> None:
    all_of_them = ask(daemon, "/completion", prompt=PROMPT, **GREEDY)
    assert ask(daemon, "/completion", prompt=PROMPT, **GREEDY, response_fields=[]).keys() == all_of_them.keys()
    assert ask(daemon, "/completion", prompt=PROMPT, **GREEDY, response_fields=["content"]).keys() == {"content"}


def test_an_answer_s_fingerprint_is_the_build_which_names_llama_cpp_s(daemon: Daemon) -> None:
    """Clients take two answers with one fingerprint and one seed for comparable."""
    build = daemon.http.get("/props").json()["build_info"]
    assert build == f"b{metadata.version('llama-cpp-python')}-localrun-{localrun.__version__}"
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", {"prompt": "x", "max_tokens": 1})):
        assert ask(daemon, path, model="tiny", **body)["system_fingerprint"] == build


def test_the_loaded_model_needs_no_name_and_is_told_of(daemon: Daemon) -> None:
    ask(daemon, "/tokenize", content="x")
    for path, body in (("/tokenize", {"content": "x"}), ("/completion", {"prompt": "x", "n_predict": 1})):
        assert daemon.post(path, body).status_code == 200
    props = daemon.http.get("/props").json()
    assert props["model_alias"] == "tiny"
    assert props["default_generation_settings"]["params"]["min_p"] == 0.05
    slots = daemon.http.get("/slots").json()
    assert [slot["id"] for slot in slots] == list(range(props["total_slots"]))
    assert not any(slot["is_processing"] for slot in slots)
    assert daemon.http.get("/slots?fail_on_no_slot=1").status_code == 200
    assert daemon.http.get("/slots?model=other").json() == []
    saving = daemon.post("/slots/0?action=save", {})
    error = saving.json()["error"]
    assert (saving.status_code, error["code"], error["type"]) == (501, 501, "not_supported_error")


def test_a_busy_slot_is_seen() -> None:
    body = {"model": "tiny", "prompt": PROMPT, "n_predict": 500, "ignore_eos": True, "stream": True}
    with (
        running_daemon(LOCALRUN_FAKE_STEP_MS="20") as daemon,
        daemon.http.stream("POST", "/completion", json=body) as response,
    ):
        lines = response.iter_lines()  # whose end is the stream's
        assert next(lines)
        busy = [slot for slot in daemon.http.get("/slots").json() if slot["is_processing"]]
        assert len(busy) == 1
        assert busy[0]["n_prompt_tokens"] > 0
        assert busy[0]["request"].startswith("req_")
        assert (busy[0]["params"]["n_predict"], busy[0]["params"]["top_k"]) == (500, 40)
        assert "stop" not in busy[0]["params"], "what a client wrote is not shown"
        state = busy[0]["next_token"][0]
        assert state["n_decoded"] >= 1
        assert state["n_remain"] + state["n_decoded"] == 500
        assert state["has_next_token"] is True
        assert isinstance(state["has_new_line"], bool)


def test_tasks_are_numbers_that_change_with_each_request() -> None:
    """Monitors compare them, also those of idle slots."""
    with running_daemon("--slots", "1") as daemon:
        tasks = []
        for _ in range(2):
            ask(daemon, "/completion", prompt=PROMPT, **GREEDY)
            (slot,) = daemon.http.get("/slots").json()
            assert slot["is_processing"] is False
            tasks.append(slot["id_task"])
            assert (slot["next_token"][0]["n_remain"], slot["next_token"][0]["n_decoded"]) == (-1, 0)
        assert all(isinstance(task, int) for task in tasks)
        assert tasks[0] < tasks[1]


def test_a_request_by_another_name_is_seen_where_it_runs() -> None:
    """Copies share their model's engine."""
    body = {"model": "gpt-4o", "prompt": PROMPT, "n_predict": 500, "ignore_eos": True, "stream": True}
    with running_daemon("--slots", "1", LOCALRUN_FAKE_STEP_MS="20") as daemon:
        ask(daemon, "/completion", prompt=PROMPT, n_predict=1)
        assert daemon.post("/api/copy", source="tiny", destination="gpt-4o").status_code == 200
        with daemon.http.stream("POST", "/completion", json=body) as response:
            lines = response.iter_lines()
            assert next(lines)
            assert 'localrun_requests_running{model="tiny"} 1.0' in daemon.http.get("/metrics").text
            for name in ("tiny", "gpt-4o"):
                (slot,) = daemon.http.get(f"/slots?model={name}").json()
                assert (slot["is_processing"], slot["model"]) == (True, "tiny")
            assert daemon.http.get("/slots?fail_on_no_slot=1").status_code == 503
        page = daemon.http.get("/metrics").text
        assert 'localrun_requests_total{api="/completion",model="tiny",outcome="done"} 1.0' in page
        assert 'model="gpt-4o"' not in page
        (pid,) = [row["pid"] for row in daemon.http.get("/localrun/v1/snapshot").json()["engines"]]
        assert daemon.http.request("DELETE", "/api/delete", json={"model": "gpt-4o"}).status_code == 200
        assert [row["pid"] for row in daemon.http.get("/localrun/v1/snapshot").json()["engines"]] == [pid]


def test_a_file_s_own_recommendations_count_below_a_modelfile_s_and_a_request_s(daemon: Daemon, tmp_path: Path) -> None:
    """As llama-server has it since its pull request 17120. Numbers that make no sense are nobody's recommendation."""
    path = tmp_path / "recommends.gguf"
    recommended = {
        "temp": 0.6,
        "top_p": 0.95,
        "top_k": 20.0,
        "penalty_repeat": 1.05,
        "min_p": 7.0,
        "xtc_threshold": math.nan,
    }
    entries = b"".join(
        struct.pack("<Q", len(key)) + key + struct.pack("<If", gguf.GGUFValueType.FLOAT32, value)
        for key, value in ((f"general.sampling.{name}".encode(), value) for name, value in recommended.items())
    )
    source = builtin.MODEL_PATH.read_bytes()
    n_pad = -(len(entries) + 23) % 32  # tensors begin at multiples of 32
    padding = struct.pack("<Q3sIQ", 3, b"pad", gguf.GGUFValueType.STRING, n_pad) + bytes(n_pad)
    n_entries = struct.pack("<Q", int.from_bytes(source[16:24], "little") + len(recommended) + 1)
    path.write_bytes(source[:16] + n_entries + entries + padding + source[24:])

    def settings(model: str, **asked: Any) -> dict[str, Any]:
        answer = ask(daemon, "/completion", model=model, prompt=PROMPT, n_predict=1, **asked)["generation_settings"]
        return {name: answer[name] for name in ("temperature", "top_p", "top_k", "repeat_penalty", "min_p")}

    right = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repeat_penalty": 1.05, "min_p": 0.05}
    assert settings(str(path)) == right
    assert settings(str(path), temperature=0.3, top_k=5) == right | {"temperature": 0.3, "top_k": 5}
    assert daemon.http.get(f"/props?model={path}").json()["default_generation_settings"]["params"]["top_p"] == 0.95
    made = {"model": "own", "from": str(path), "parameters": {"temperature": 0.1}}
    assert daemon.post("/api/create", made | {"stream": False}).status_code == 200
    assert settings("own") == right | {"temperature": 0.1}
    lines = daemon.post("/api/show", model="own").json()["parameters"].splitlines()
    said = {"num_ctx": "4096", "temperature": "0.1", "top_p": "0.95", "top_k": "20", "repeat_penalty": "1.05"}
    assert dict(line.split() for line in lines) == said


def test_props_tell_what_counts_for_the_model_that_is_named(daemon: Daemon) -> None:
    made = {"model": "short", "from": "tiny", "parameters": {"num_predict": 7, "stop": ["xx"], "num_ctx": 256}}
    assert daemon.post("/api/create", made | {"stream": False}).status_code == 200
    ask(daemon, "/tokenize", content="x")
    (n_ctx,) = {slot["n_ctx"] for slot in daemon.http.get("/slots?model=tiny").json()}
    told = daemon.http.get("/props?model=short").json()["default_generation_settings"]
    assert (told["params"]["n_predict"], told["params"]["stop"]) == (7, ["xx"])
    assert told["n_ctx"] == n_ctx, "the engine that has its files"
    ask(daemon, "/models/unload", model="tiny")
    assert daemon.http.get("/props?model=short").json()["default_generation_settings"]["n_ctx"] == 256


def test_a_router_tells_states_loads_and_unloads() -> None:
    with running_daemon("--max-models", "2") as daemon:
        props = daemon.http.get("/props").json()
        assert (props["role"], props["max_instances"], props["models_autoload"]) == ("router", 2, True)

        def status(path: str = "/models") -> str:
            answer = daemon.http.get(path).json()
            (row,) = [row for row in answer.get("data", [answer]) if row["id"] == "tiny"]
            assert row["architecture"] == {"input_modalities": ["text"], "output_modalities": ["text"]}
            return str(row["status"]["value"])

        assert status() == status("/v1/models/tiny") == "unloaded"
        for _ in range(2):
            assert ask(daemon, "/models/load") == {"success": True}
            assert status() == status("/v1/models/tiny") == "loaded"
        assert ask(daemon, "/models/unload") == {"success": True}
        assert status() == "unloaded"
        assert refused(daemon, "/models/unload") == "model"
        unknown = daemon.post("/models/load", model="none-such")
        assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")
        (also,) = [row for row in daemon.http.get("/v1/models").json()["models"] if row["name"] == "tiny"]
        assert also == {"name": "tiny", "model": "tiny", "capabilities": ["completion"]}


def test_a_null_is_no_name(daemon: Daemon) -> None:
    ask(daemon, "/tokenize", content="x")
    chat = {"messages": [{"role": "user", "content": "x"}]}
    for path, body in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", chat),
        ("/v1/messages", chat),
        ("/v1/responses", {"input": "x"}),
        ("/v1/embeddings", {"input": "x"}),
    ):
        answer = daemon.post(path, body | {"model": None, "max_tokens": 1})
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"], "one that is here"


def test_what_is_loaded_comes_first() -> None:
    with running_daemon() as daemon:
        folder = daemon.home / "data" / "models"
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("fox", "owl"):
            shutil.copy(builtin.model_path(), folder / f"{name}.gguf")
        for name in ("owl", "fox"):
            ask(daemon, "/models/load", model=name)
            assert daemon.http.get("/models").json()["models"][0]["name"] == name
            ask(daemon, "/models/unload", model=name)


def test_a_daemon_without_a_loaded_model_sleeps_until_a_request_loads_one() -> None:
    with running_daemon() as daemon:
        for _ in range(2):
            assert daemon.http.get("/props").json()["is_sleeping"] is True
            assert daemon.http.get("/props?model=tiny").json()["is_sleeping"] is True
            assert daemon.post("/v1/messages/count_tokens", messages=[{"role": "user", "content": "x"}]).is_success
            assert daemon.http.get("/props").json()["is_sleeping"] is False
            ask(daemon, "/models/unload")


def test_without_a_model_there_is_the_daemon(tmp_path: Any) -> None:
    with running_daemon() as daemon:
        assert daemon.http.get("/props").json()["role"] == "router"
        assert daemon.http.get("/slots").json() == []
        assert daemon.http.get("/props?model=tiny").json()["model_alias"] == "tiny"
        assert daemon.http.get("/props?model=none-such").status_code == 404
