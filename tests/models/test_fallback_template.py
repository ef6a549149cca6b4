"""Templates for files that bring none: by the vocabulary, then by the architecture."""

from __future__ import annotations

from typing import Any

import pytest

from localrun.models.storage.model import fallback_template
from localrun.server.templates.worker import render

CHAT = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "U"},
    {"role": "assistant", "content": "A"},
    {"role": "user", "content": "V"},
]


def rendered(template: str, messages: list[dict[str, Any]] = CHAT) -> str:
    variables = {"messages": messages, "add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>"}
    return render(template, variables, 10_000)


@pytest.mark.parametrize(
    ("architecture", "tokens", "expected"),
    [
        ("llama", ("<|im_start|>",), "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"),
        ("llama", ("<|start_header_id|>",), "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"),
        ("llama4", (), "<s><|header_start|>system<|header_end|>\n\nS<|eot|>"),
        ("llama", ("[INST]",), "<s>[INST] S\n\nU [/INST] A</s>[INST] V [/INST]"),
        ("gemma3", (), "<s><start_of_turn>user\nS<end_of_turn>\n"),
        ("phi3", (), "<s><|system|>\nS<|end|>\n<|user|>\nU<|end|>\n"),
        ("phi3", ("<|im_start|>", "<|im_sep|>"), "<|im_start|>system<|im_sep|>S<|im_end|>"),
        ("command-r", (), "<s><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>S<|END_OF_TURN_TOKEN|>"),
        ("deepseek2", (), "<s>S<｜User｜>U<｜Assistant｜>A<｜end▁of▁sentence｜><｜User｜>V<｜Assistant｜>"),
        ("granite", (), "<|start_of_role|>system<|end_of_role|>S<|end_of_text|>\n"),
        ("chatglm", (), "[gMASK]<sop><|system|>\nS<|user|>\nU"),
        ("stablelm", (), "<|system|>\nS</s>\n"),
        ("falcon", (), "<s>S\n\nUSER: U\nASSISTANT: A</s>\nUSER: V\nASSISTANT:"),
        ("never-heard-of", (), "<|im_start|>system\nS<|im_end|>\n"),
    ],
)
def test_a_family_s_own_form(architecture: str, tokens: tuple[str, ...], expected: str):
    text = rendered(fallback_template(architecture, tokens))
    assert text.startswith(expected)
    assert text.index("U") < text.index("V")


@pytest.mark.parametrize("architecture", ["llama", "llama4", "gemma", "phi3", "command-r", "granite", "chatglm"])
def test_the_prompt_ends_where_the_model_speaks(architecture: str):
    with_turn = rendered(fallback_template(architecture))
    assert with_turn.rstrip().endswith(
        ("assistant", "model", "<|assistant|>", "<|CHATBOT_TOKEN|>", "<|header_end|>", ">")
    )
    assert rendered(fallback_template(architecture), [{"role": "user", "content": None}]) != ""
