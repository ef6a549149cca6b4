"""Chat templates for model files that bring none.

What the vocabulary has tells the format better than the architecture does: a Llama fine-tuned with `<|im_start|>`
writes ChatML. So control tokens are asked first, then the architecture, and ChatML is the last resort, since most
models have seen it.

Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

_CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

_GEMMA = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- set role = 'model' if message.role == 'assistant' else 'user' -%}
{{ '<start_of_turn>' + role + '\\n' + (message.content or '') | trim + '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""

_LLAMA_3 = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- set role = 'ipython' if message.role == 'tool' else message.role -%}
{{ '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' + (message.content or '') | trim + '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif -%}
"""

_LLAMA_4 = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- set role = 'ipython' if message.role == 'tool' else message.role -%}
{{ '<|header_start|>' + role + '<|header_end|>\\n\\n' + (message.content or '') | trim + '<|eot|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|header_start|>assistant<|header_end|>\\n\\n' }}{%- endif -%}
"""

# System texts go in front of the next user message, where these models were trained to see them.
_MISTRAL = """\
{{- bos_token -}}
{%- set pending = namespace(system='') -%}
{%- for message in messages -%}
{%- if message.role == 'system' -%}
{%- set pending.system = pending.system + (message.content or '') + '\\n\\n' -%}
{%- elif message.role == 'assistant' -%}
{{ ' ' + (message.content or '') | trim + eos_token }}
{%- else -%}
{{ '[INST] ' + pending.system + (message.content or '') + ' [/INST]' }}
{%- set pending.system = '' -%}
{%- endif -%}
{%- endfor -%}
{%- if pending.system -%}{{ '[INST] ' + pending.system | trim + ' [/INST]' }}{%- endif -%}
"""

_PHI_3 = """\
{{- bos_token -}}
{%- for message in messages -%}
{{ '<|' + message.role + '|>\\n' + (message.content or '') + '<|end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>\\n' }}{%- endif -%}
"""

_PHI_4 = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '<|im_sep|>' + (message.content or '') + '<|im_end|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant<|im_sep|>' }}{%- endif -%}
"""

_COMMAND_R = """\
{{- bos_token -}}
{%- set names = {'system': '<|SYSTEM_TOKEN|>', 'tool': '<|SYSTEM_TOKEN|>', 'assistant': '<|CHATBOT_TOKEN|>'} -%}
{%- for message in messages -%}
{%- set name = names.get(message.role, '<|USER_TOKEN|>') -%}
{{ '<|START_OF_TURN_TOKEN|>' + name + (message.content or '') | trim + '<|END_OF_TURN_TOKEN|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{%- endif -%}
"""

_DEEPSEEK = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}{{ '<｜Assistant｜>' + (message.content or '') + '<｜end▁of▁sentence｜>' }}
{%- elif message.role == 'system' -%}{{ message.content or '' }}
{%- else -%}{{ '<｜User｜>' + (message.content or '') }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<｜Assistant｜>' }}{%- endif -%}
"""

_GRANITE = """\
{%- for message in messages -%}
{%- set role = 'tool_response' if message.role == 'tool' else message.role -%}
{{ '<|start_of_role|>' + role + '<|end_of_role|>' + (message.content or '') + '<|end_of_text|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif -%}
"""

_GLM = """\
{{- '[gMASK]<sop>' -}}
{%- for message in messages -%}
{%- set role = 'observation' if message.role == 'tool' else message.role -%}
{{ '<|' + role + '|>\\n' + (message.content or '') }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}
"""

_ZEPHYR = """\
{%- for message in messages -%}
{{ '<|' + message.role + '|>\\n' + (message.content or '') + eos_token + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>\\n' }}{%- endif -%}
"""

_VICUNA = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}{{ 'ASSISTANT: ' + (message.content or '') + eos_token + '\\n' }}
{%- elif message.role == 'system' -%}{{ (message.content or '') + '\\n\\n' }}
{%- else -%}{{ 'USER: ' + (message.content or '') + '\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'ASSISTANT:' }}{%- endif -%}
"""

# By tokens that only one format uses; all of an entry must be there.
_BY_TOKENS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|im_start|>", "<|im_sep|>"), _PHI_4),
    (("<|im_start|>",), _CHATML),
    (("<|start_header_id|>",), _LLAMA_3),
    (("<|header_start|>",), _LLAMA_4),
    (("<start_of_turn>",), _GEMMA),
    (("<|START_OF_TURN_TOKEN|>",), _COMMAND_R),
    (("<｜Assistant｜>",), _DEEPSEEK),
    (("<|start_of_role|>",), _GRANITE),
    (("[gMASK]", "<sop>"), _GLM),
    (("<|end|>", "<|assistant|>", "<|user|>"), _PHI_3),
    (("[INST]",), _MISTRAL),
)
_BY_ARCHITECTURE: tuple[tuple[str, str], ...] = (
    ("gemma", _GEMMA),
    ("llama4", _LLAMA_4),
    ("mistral", _MISTRAL),
    ("phi", _PHI_3),
    ("command-r", _COMMAND_R),
    ("cohere", _COMMAND_R),
    ("deepseek", _DEEPSEEK),
    ("granite", _GRANITE),
    ("chatglm", _GLM),
    ("glm4", _GLM),
    ("stablelm", _ZEPHYR),
    ("falcon", _VICUNA),
)
_NAMES = {
    _CHATML: "ChatML", _GEMMA: "Gemma", _LLAMA_3: "Llama 3", _LLAMA_4: "Llama 4", _MISTRAL: "Mistral", _PHI_3: "Phi-3",
    _PHI_4: "Phi-4", _COMMAND_R: "Command R", _DEEPSEEK: "DeepSeek", _GRANITE: "Granite", _GLM: "GLM",
    _ZEPHYR: "Zephyr", _VICUNA: "Vicuna",
}  # fmt: skip


def by_marks(text: str | Collection[str]) -> str:
    """The template whose marks are among these tokens, or in this text; "" for none."""
    return next((template for marks, template in _BY_TOKENS if all(mark in text for mark in marks)), "")


def fallback_template(architecture: str, control_tokens: Sequence[str] = ()) -> str:
    """The template for a model file that brings none."""
    if template := by_marks(frozenset(control_tokens)):
        return template
    for prefix, template in _BY_ARCHITECTURE:
        if architecture.startswith(prefix):
            return template
    return _CHATML


def name_of(template: str) -> str:
    """What people call one of these templates."""
    return _NAMES[template]
