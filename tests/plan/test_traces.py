from __future__ import annotations

from pathlib import Path

import pytest

from localrun.errors import BadRequest
from localrun.plan.traces import named
from localrun.plan.workload import Session

OWN = """\
{"at_s": 1.5, "prompt": [["system", 600], ["u7/1", 84]], "output_tokens": 187, "client": "u7", "lane": "interactive"}
{"at_s": 2.5, "prompt": [["system", 600], ["u7/1", 84], ["u7/1.answer", 187], ["u7/2", 40]], "output_tokens": 20}
{"at_s": 5.5, "prompt": [["system", 600]], "output_tokens": 1}
"""
MOONCAKE = """\
{"timestamp": 0, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 2353]}
{"timestamp": 0, "input_length": 700, "output_length": 26, "hash_ids": [46, 74]}
{"timestamp": 3000, "input_length": 600, "output_length": 2, "hash_ids": [46]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:05.9799600,110,27
"""
BURST = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
5,ChatGPT,1087,230,1317,Conversation log
6,GPT-4,417,0,417,API log
9,GPT-4,76,12,88,API log
"""


def sessions(tmp_path: Path, text: str, suffix: str) -> tuple[list[Session], float]:
    path = tmp_path / f"trace{suffix}"
    path.write_text(text)
    found = named(str(path))
    assert found.own_rate_per_s is not None
    return found.sessions(100, 1), found.own_rate_per_s


def test_our_own_format(tmp_path: Path) -> None:
    found, rate_per_s = sessions(tmp_path, OWN, ".jsonl")
    assert rate_per_s == 0.5
    assert [each.at / rate_per_s for each in found] == [0.0, 1.0, 4.0]
    (first,) = found[0].turns
    assert first.parts == (("system", 600), ("u7/1", 84))
    assert (first.n_output, first.client, first.lane) == (187, "u7", "interactive")


def test_mooncake_shares_blocks(tmp_path: Path) -> None:
    found, _ = sessions(tmp_path, MOONCAKE, ".jsonl")
    prompts = [each.turns[0] for each in found]
    assert [turn.n_prompt for turn in prompts] == [1100, 700, 600]
    assert prompts[0].parts[0] == prompts[1].parts[0] == ("46/512", 512)
    assert prompts[0].parts[2] == ("2353/76", 76)
    assert prompts[2].parts[1][1] == 88  # what no hash stands for is nobody else's


def test_azure_and_burstgpt(tmp_path: Path) -> None:
    found, rate_per_s = sessions(tmp_path, AZURE, ".csv")
    assert [each.turns[0].n_prompt for each in found] == [4808, 3180, 110]
    assert [each.at / rate_per_s for each in found] == pytest.approx([0.0, 0.052, 2.0])
    found, rate_per_s = sessions(tmp_path, BURST, ".csv")
    assert [(each.turns[0].n_prompt, each.turns[0].n_output) for each in found] == [(472, 18), (1087, 230), (76, 12)]
    assert [each.at / rate_per_s for each in found] == pytest.approx([0.0, 0.5, 4.0])


@pytest.mark.parametrize(
    ("text", "suffix", "words"),
    [
        (OWN.replace('"output_tokens": 20', '"output_tokens": 0'), ".jsonl", "line 2: .*output_tokens"),
        (OWN.replace('{"at_s": 5.5', '{"at_s": 5.5,,'), ".jsonl", "line 3: "),
        (OWN.replace("5.5", "0.5"), ".jsonl", "line 3: its time, 0.5 s, is before"),
        (OWN.replace("1.5", "-1.5"), ".jsonl", "line 1: the time is -1.5"),
        (MOONCAKE.replace('"hash_ids": [46, 74]', '"hash_ids": 46'), ".jsonl", "line 2: "),
        (AZURE.replace("3180", "many"), ".csv", "line 3: ContextTokens is 'many'"),
        (AZURE.replace("18:17:05.97", "18:17:04.00"), ".csv", "line 4: its time"),
        (AZURE.replace("2023-11-16 18:17:05.9799600", "noon"), ".csv", "line 4: TIMESTAMP is 'noon'"),
        (BURST.replace("9,GPT-4,76", "inf,GPT-4,76"), ".csv", "line 5: the time is inf"),
        ("a,b\n1,2\n", ".csv", "is no trace"),
        ("", ".csv", "is no trace"),
        ("\n".join(AZURE.splitlines()[:2]), ".csv", "has 1 requests"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, text: str, suffix: str, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        sessions(tmp_path, text, suffix)
