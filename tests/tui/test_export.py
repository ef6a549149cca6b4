from __future__ import annotations

import json

import pytest

from localrun.tui.export import code_blocks, to_json, to_markdown
from localrun.tui.history import Message

MESSAGES = [
    Message(1, 1, None, "user", "What is a fox?", {}, 1_700_000_000.0),
    Message(2, 1, 1, "assistant", "An **animal**.", {"thinking": "hm,\nwell", "caption": "3 tokens"}, 1_700_000_001.0),
]


def test_markdown_has_all_that_was_said():
    text = to_markdown("Foxes", "tiny", "Be brief.", MESSAGES)
    assert text.startswith("# Foxes\n\nModel: tiny\n\nSystem prompt:\n\n> Be brief.\n\n## You, 2023-11-1")
    assert text.endswith("> hm,\n> well\n\nAn **animal**.\n")


def test_json_can_be_sent_again():
    document = json.loads(to_json("Foxes", "tiny", "Be brief.", {"temperature": 0.5}, MESSAGES))
    assert (document["title"], document["model"], document["options"]) == ("Foxes", "tiny", {"temperature": 0.5})
    assert [(m["role"], m["content"]) for m in document["messages"]] == [
        ("user", "What is a fox?"),
        ("assistant", "An **animal**."),
    ]
    assert document["messages"][1]["created_at"] == "2023-11-14T22:13:21+00:00"


@pytest.mark.parametrize(
    ("markdown", "blocks"),
    [
        ("no code", []),
        ("```python\na\nb\n```\ntext\n~~~\nc\n~~~", ["a\nb", "c"]),
        ("````md\n```\nin\n```\n````", ["```\nin\n```"]),
        ("```\ncut off", ["cut off"]),
        ("```\n```", [""]),
    ],
)
def test_code_blocks(markdown: str, blocks: list[str]):
    assert code_blocks(markdown) == blocks
