"""The committed file: what its header says, how it cuts text, and that it talks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import gguf
import jinja2.sandbox
import llama_cpp
import numpy
import pytest

from localrun.models import builtin
from tiny import held_out
from tiny.held_out import Case, Reply

FIXTURE = Path(__file__).parent / "token_ids.json"
MAX_SIZE_BYTES = 12_000_000


@pytest.fixture(scope="module")
def reader() -> gguf.GGUFReader:
    return gguf.GGUFReader(builtin.model_path())


@pytest.fixture(scope="module")
def model() -> Iterator[llama_cpp.Llama]:
    opened = llama_cpp.Llama(str(builtin.model_path()), n_ctx=4096, n_threads=1, n_threads_batch=1, verbose=False)
    yield opened
    opened.close()


def value(reader: gguf.GGUFReader, key: str) -> object:
    field = reader.get_field(key)
    assert field is not None, key
    return field.contents()


def test_the_file_is_small() -> None:
    assert builtin.model_path() == builtin.MODEL_PATH
    assert 1_000_000 < builtin.model_path().stat().st_size <= MAX_SIZE_BYTES


def test_finding_the_model_imports_no_training_tool() -> None:
    code = (
        "import sys, localrun.models.builtin; print([m for m in ('torch', 'tokenizers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("general.architecture", "llama"),
        ("general.name", "tiny"),
        ("general.license", "mit"),
        ("general.author", "the localrun project"),
        ("llama.context_length", 4096),
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", "qwen2"),
        ("tokenizer.ggml.add_bos_token", False),
    ],
)
def test_the_header_says(reader: gguf.GGUFReader, key: str, expected: object) -> None:
    assert value(reader, key) == expected


def test_control_tokens_are_marked_and_end_the_turn(reader: gguf.GGUFReader) -> None:
    tokens, types = value(reader, "tokenizer.ggml.tokens"), value(reader, "tokenizer.ggml.token_type")
    assert isinstance(tokens, list)
    assert isinstance(types, list)
    control = {token for token, kind in zip(tokens, types, strict=True) if kind == gguf.TokenType.CONTROL}
    assert control == {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}
    for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"):
        index = value(reader, key)
        assert isinstance(index, int)
        assert tokens[index] == "<|im_end|>"


def test_tensors_are_finite_and_can_be_quantised(reader: gguf.GGUFReader) -> None:
    n_blocks = value(reader, "llama.block_count")
    assert isinstance(n_blocks, int)
    assert len(reader.tensors) == 2 + 9 * n_blocks
    for tensor in reader.tensors:
        assert numpy.isfinite(tensor.data).all(), tensor.name
        assert all(int(size) % 32 == 0 for size in tensor.shape), tensor.name
        matrix = len(tensor.shape) == 2
        expected = gguf.GGMLQuantizationType.F16 if matrix else gguf.GGMLQuantizationType.F32
        assert tensor.tensor_type == expected, tensor.name


def test_llama_cpp_cuts_text_as_the_training_did(model: llama_cpp.Llama) -> None:
    rows = json.loads(FIXTURE.read_text(encoding="utf-8"))
    assert len(rows) > 300
    different = [text for text, ids in rows if model.tokenize(text.encode(), add_bos=False, special=True) != ids]
    assert different == []


def test_text_survives_the_tokenizer(model: llama_cpp.Llama) -> None:
    for text in (
        "Hello, Zoë!",
        "  two  blanks\n\n",
        "😀 👩‍👩‍👧‍👦",
        "def f(x):\n\treturn 1",
        "日本語 12",
        "\u00a0\u2028",
    ):
        ids = model.tokenize(text.encode(), add_bos=False, special=False)
        assert model.detokenize(ids).decode() == text


def test_the_template_renders_chatml(reader: gguf.GGUFReader) -> None:
    source = value(reader, "tokenizer.chat_template")
    assert isinstance(source, str)
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Bye"},
    ]
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
    )
    template = environment.from_string(source)
    assert template.render(messages=messages) == expected
    assert template.render(messages=messages, add_generation_prompt=True) == expected + "<|im_start|>assistant\n"


def answer(model: llama_cpp.Llama, case: Case) -> Reply:
    messages: list[dict[str, str]] = []
    reply = Reply("", 0, "")
    for turn in case.turns:
        messages.append({"role": "user", "content": turn})
        done = model.create_chat_completion(messages, temperature=0, max_tokens=300)  # type: ignore[arg-type]
        choice = done["choices"][0]
        reply = Reply(choice["message"]["content"], done["usage"]["completion_tokens"], choice["finish_reason"])
        messages.append({"role": "assistant", "content": reply.text})
    return reply


@pytest.mark.parametrize("skill", [skill for skill in held_out.SKILLS if skill.required], ids=lambda skill: skill.name)
def test_a_few_held_out_cases_of_each_skill(model: llama_cpp.Llama, skill: held_out.Skill) -> None:
    cases = held_out.cases(skill, 10)
    n_right = sum(case.is_right(answer(model, case)) for case in cases)
    assert n_right >= 9


def test_a_made_up_name_is_recalled_after_a_story(model: llama_cpp.Llama) -> None:
    name = "Brelunka" + Random(0).choice("rstv")
    turns = (f"Hello, my name is {name}.", "tell me a story about a fox", "what is my name?")
    assert re.search(rf"\b{name}\b", answer(model, Case(turns, lambda _reply: True)).text)
