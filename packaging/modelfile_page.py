"""`localrun/docs/modelfile.md`: every instruction and every parameter of a Modelfile, from the code that reads them."""

from __future__ import annotations

from localrun.models import modelfile
from localrun.server.openapi.document import notes

HEAD = '''\
# Modelfile

A Modelfile is a short text that makes a new model out of one that you have: with other parameters, a system prompt, an
adapter. The format is Ollama's.

```modelfile
FROM qwen3:8b
PARAMETER temperature 0.2
PARAMETER num_ctx 16384
SYSTEM """You are a patient teacher.
Answer in one paragraph."""
```

```sh
localrun create teacher --file Modelfile
localrun run teacher "Why is the sky blue?"
localrun show teacher --modelfile
```

Each instruction begins a line; its name may be in upper or lower case. A line that begins with `#` is a comment. A text
in three double quotes may go over several lines. An error names the line.

## Instructions

| instruction | |
|---|---|
'''

INSTRUCTIONS = {
    "FROM": "The model to begin with: a name, which is pulled first if it is not here, or the path of a GGUF file, "
    "relative to the Modelfile. A second `FROM` names the projector, as in Ollama.",
    "PROJECTOR": "The GGUF file that makes the model see or hear; `none` drops the base's "
    "([projectors](models.md#projectors)).",
    "PARAMETER": "A name and a value, from the table below. Repeat the line for several `stop` texts.",
    "TEMPLATE": "A chat template in Jinja, instead of the one in the GGUF file. Ollama's Go templates "
    "are not run: the file's own counts, or if it has none, the one that the marks or the vocabulary suggest.",
    "SYSTEM": "The system prompt, for conversations that bring none.",
    "MESSAGE": "A role (`user`, `assistant` or `system`) and a text that every conversation begins with.",
    "LICENSE": "The text of a licence; kept and shown.",
    "ADAPTER": "A LoRA or a control vector, by name or path, with its strength behind an equals sign if that is not 1 "
    "([adapters](models.md#adapters)). Without `FROM` the Modelfile gives an adapter a name.",
    "DRAFT": 'The draft model, by name or path ([draft models](models.md#draft-models)); `""` drops the base\'s.',
    "REQUIRES": "A version; kept and shown, and otherwise ignored.",
}

TAIL = """
`RENDERER` and `PARSER` are left out, and `create` says so: localrun uses the chat template in the GGUF file. Names of
older Ollama releases that nothing reads any more (RETIRED) are accepted and ignored.

What a request says counts over the Modelfile, and the Modelfile over the settings file:
[how a model is loaded](models.md#how-a-model-is-loaded).
"""


def text() -> str:
    """The page. Raises KeyError for an instruction that nobody described."""
    rows = [f"| `{name}` | {INSTRUCTIONS[name]} |\n" for name in modelfile.INSTRUCTIONS]
    parameters = [f"| `{name}` | {_note(name)} |\n" for name in sorted(modelfile.KNOWN_PARAMETERS)]
    retired = ", ".join(f"`{name}`" for name in sorted(modelfile.RETIRED_PARAMETERS))
    table = "\n## Parameters\n\n| parameter | |\n|---|---|\n" + "".join(parameters)
    return HEAD + "".join(rows) + table + TAIL.replace("RETIRED", retired)


def _note(name: str) -> str:
    choices = modelfile.WORD_PARAMETERS.get(name)
    note = notes()[name].replace("|", "\\|")
    return f"{note} {', '.join(f'`{choice}`' for choice in choices)}." if choices else note
