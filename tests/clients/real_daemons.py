"""The two daemons that every real client speaks with.

The first has the built-in model `tiny`, an encoder `bert`, `caller`: `tiny` with a template that knows tools, and
`gemma3` that sees and `ultravox` that hears. The second has the first three on fake engines that write what a prompt
tells them (`SAY[[text]]`), slowly enough to be cancelled, and can pull `org/fox-GGUF`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from localrun.models import builtin
from tests.daemon import Daemon, running_daemon
from tests.engine.native.media import make_pair
from tests.hub.repository import Repository
from tests.hub.server import Hub
from tests.models.synthesize_embedding import synthesize_embedding

TOOL_TEMPLATE = """\
{%- if tools %}<|im_start|>system
You may call these functions:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}To call one, write <tool_call>
{"name": "its name", "arguments": {}}
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ 'user' if message.role == 'tool' else message.role }}
{% if message.role == 'tool' %}<tool_response>
{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{{ call.function | tojson }}
</tool_call>
{%- endfor %}
{%- if message.role == 'tool' %}
</tool_response>
{%- endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@contextmanager
def real_daemons(folder: Path) -> Iterator[tuple[Daemon, Daemon]]:
    """With real weights, and with fake engines. `folder` is an empty one for the models."""
    models = [folder / "real", folder / "fake"]
    for each in models:
        each.mkdir()
        synthesize_embedding("tiny-bert", each / "bert.gguf")
    for kind in ("gemma3", "ultravox"):
        make_pair(models[0], kind).projector.rename(models[0] / f"mmproj-{kind}.gguf")
    with (
        Hub(Repository("org/fox-GGUF", {"fox-F16.gguf": builtin.MODEL_PATH.read_bytes()})) as hub,
        running_daemon(fake=False, LOCALRUN_MODELS=str(models[0])) as real,
        running_daemon(
            LOCALRUN_MODELS=str(models[1]), LOCALRUN_FAKE_SCRIPTS="1", LOCALRUN_FAKE_STEP_MS="2",
            LOCALRUN_KV_CELLS="16384", HF_ENDPOINT=hub.endpoint,
        ) as fake,
    ):  # fmt: skip
        for daemon in (real, fake):
            made = daemon.post("/api/create", model="caller", **{"from": "tiny"}, template=TOOL_TEMPLATE, stream=False)
            assert made.json() == {"status": "success"}, made.text
        yield real, fake
