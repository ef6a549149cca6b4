from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from localrun.bench.arrivals import Session
from localrun.errors import BadRequest
from localrun.plan.traces import named

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
        (BURST.replace("9,GPT-4,76", "nan,GPT-4,76"), ".csv", "line 5: the time is nan"),
        (
            BURST.replace("GPT-4,76", "GPT-4,nan"),
            ".csv",
            "line 5: Request tokens is 'nan', which is not from 0 to 10000000",
        ),
        (BURST.replace("GPT-4,76", "GPT-4,-76"), ".csv", "line 5: Request tokens is '-76'"),
        (BURST.replace("GPT-4,76", "GPT-4,1e30"), ".csv", "line 5: Request tokens is '1e30'"),
        (BURST.replace("9,GPT-4,76,12,88,API log", "9,GPT-4"), ".csv", "line 5: it has 2 of 6 columns"),
        (BURST + BURST, ".csv", "line 6: Timestamp is 'Timestamp', which is neither a date nor seconds"),
        (BURST + '10,"' + 200_000 * "x", ".csv", "line 6: field larger than field limit"),
        (MOONCAKE.replace("3000", "-3000"), ".jsonl", "line 3: its time, -3 s, is before"),
        (
            MOONCAKE + '{"delay": 5, "input_length": 9, "output_length": 9, "session_id": "s"}',
            ".jsonl",
            "line 4: .*session",
        ),
        (MOONCAKE.replace(', "output_length": 26', ""), ".jsonl", "line 2: .*output_length"),
        ("[" + ",".join(MOONCAKE.splitlines()) + "]", ".json", "is one JSON array"),
        ("a,b\n1,2\n", ".csv", "is no trace"),
        ("", ".csv", "is empty"),
        ("\n\n", ".jsonl", "is empty"),
        (OWN.replace("187,", "0,", 1), ".jsonl", "line 1: output_tokens must be a whole number of at least 1"),
        (OWN.replace('["system", 600]', '["system", "x"]'), ".jsonl", "line 1: prompt must be a list of"),
        (OWN.replace('"at_s": 1.5, ', ""), ".jsonl", "line 1: at_s is missing; a line has at_s"),
        (OWN.replace("5.5", "1e300"), ".jsonl", r"line 3: the time is 1e\+300 s"),
        (OWN.replace('"client"', '"target_itl_s": -5, "client"'), ".jsonl", "line 1: target_itl_s must be more than 0"),
        (OWN.replace('"client"', '"target_itl_s": 1e300, "client"'), ".jsonl", "line 1: target_itl_s must be"),
        (MOONCAKE.replace('"timestamp": 3000', '"session_id": 1, "delay": 1e300'), ".jsonl", "line 3: delay must be"),
        (AZURE.replace("2023-11-16 18:17:04.0319600", "5"), ".csv", "line 3: TIMESTAMP is '5', and .* have dates"),
        ("\n".join(AZURE.splitlines()[:2]), ".csv", "has 1 request with"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, text: str, suffix: str, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        sessions(tmp_path, text, suffix)


def read(tmp_path: Path, content: bytes, suffix: str = ".csv") -> list[Session]:
    path = tmp_path / f"trace{suffix}"
    path.write_bytes(content)
    return named(str(path)).sessions(100, 1)


def lengths(found: list[Session]) -> list[tuple[int, int]]:
    return [(turn.n_prompt, turn.n_output) for each in found for turn in each.turns]


EXPECTED = [(4808, 10), (3180, 8), (110, 27)]


@pytest.mark.parametrize(
    "content",
    [
        AZURE.encode("utf-8-sig"),
        AZURE.encode("utf-16"),
        gzip.compress(AZURE.encode()),
        AZURE.replace("\n", "\r\n").encode(),
        AZURE.replace(",", ";").encode(),
        AZURE.replace(",", "\t").encode(),
        AZURE.replace("\n", "\n\n , \n").encode(),
        AZURE.replace("4808,10", '"4,808", "10.0"').encode(),
        ("\n" + AZURE).encode(),
    ],
    ids=["BOM", "UTF-16", "gzip", "CRLF", "semicolons", "tabs", "empty lines", "quoted", "first line empty"],
)
def test_a_table_as_programs_leave_it(tmp_path: Path, content: bytes) -> None:
    assert lengths(read(tmp_path, content)) == EXPECTED


@pytest.mark.parametrize(
    "table",
    [
        # Azure 2024: a time zone, and no fraction where it is 0. A table of which only some lines have one.
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,4808,10\n"
        "2024-05-10 00:00:01+00:00,3180,8\n2024-05-10 00:00:02.5,110,27\n",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10T00:00:00Z,4808,10\n2024-05-10 02:00:01+02:00,3180,8\n"
        "2024-05-10 00:00:02 UTC,110,27\n",
        # Azure's multimodal trace (AzurePublicDataset#52).
        "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n2024-10-15 00:00:00.5,0,4808,10\n"
        "2024-10-15 00:00:01.5,2,3180,8\n2024-10-15 00:00:02.5,0,110,27\n",
        # What pandas makes of one, times as seconds, with an index.
        ",TIMESTAMP,ContextTokens,GeneratedTokens\n0,0.0,4808,10\n1,0.052,3180,8\n2,2.0,110,27\n",
        # BurstGPT in another order, as it is exported from the hub; with sessions, as announced in its README.
        "Log Type,Timestamp,Request tokens,Response tokens,Total tokens,Model\nAPI log,5.0,4808,10,4818,GPT-4\n"
        "API log,6.0,3180,8,3188,GPT-4\nAPI log,8.0,110,27,137,GPT-4\nAPI log,8.0,11,0,11,GPT-4\n",
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,1,3.5,GPT-4,4808,10,4818,API log\n6,,1,GPT-4,3180,8,3188,API log\n8,2,1,GPT-4,110,27,137,API log\n",
        # Simulators' own: arrival_time and lengths; logs of Azure's portal.
        "arrival_time,prompt_length,output_length\n0.0,4808,10\n0.05,3180,8\n0.12,110,27\n",
        "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,4808,10\n0.05,3180,8\n0.12,110,27\n",
        "Time,PromptTokenCount,GeneratedTokenCount\n0.0,4808,10\n0.05,3180,8\n0.12,110,27\n",
        'timestamp [UTC],input_tokens,output_tokens,total_tokens\n"8/15/2025, 5:12:14.121000 PM",4808,10,4818\n'
        '"8/15/2025, 5:50:43.282000 PM",3180,8,3188\n"8/16/2025, 5:50:43.282000 AM",110,27,137\n',
    ],
    ids=["2024", "zones", "multimodal", "pandas", "hub", "sessions", "simulators", "Vidur", "old Vidur", "portal"],
)
def test_tables_as_they_are_published(tmp_path: Path, table: str) -> None:
    found = read(tmp_path, table.encode())
    assert lengths(found) == EXPECTED
    assert [each.at for each in found] == sorted(each.at for each in found)


def test_hashes_of_other_blocks_and_of_64_bits(tmp_path: Path) -> None:
    """Bailian's have 16 tokens each, and its times are seconds; others have more digits than 32 bits (dynamo#12046)."""
    lines = [
        {"chat_id": 1, "parent_chat_id": -1, "timestamp": 0.5, "input_length": 40, "output_length": 5, "type": "text",
         "turn": 1, "hash_ids": [1 << 63, (1 << 63) + (1 << 32), 7]},
        {"chat_id": 2, "parent_chat_id": -1, "timestamp": 2.5, "input_length": 33, "output_length": 5, "type": "text",
         "turn": 1, "hash_ids": [1 << 63, 1 << 32, 8]},
    ]  # fmt: skip
    first, second = read(tmp_path, "\n".join(map(json.dumps, lines)).encode(), ".jsonl")
    assert [n for _, n in first.turns[0].parts] == [16, 16, 8]
    assert first.turns[0].parts[0] == second.turns[0].parts[0]
    assert first.turns[0].parts[1] != second.turns[0].parts[1]
    assert second.at == pytest.approx(1.0)  # one request in two seconds


def test_more_hashes_than_tokens_and_none(tmp_path: Path) -> None:
    """As in the test plan of guidellm#948, and as AIPerf allows it (aiperf#273)."""
    lines = [
        {"timestamp": 0.0, "input_length": 10, "output_length": 5, "hash_ids": [0]},
        {"timestamp": 0.2, "input_length": 20, "output_length": 8, "hash_ids": [0, 1]},
        {"timestamp": 0.4, "input_length": 15, "output_length": 6},
    ]
    found = read(tmp_path, "\n".join(map(json.dumps, lines)).encode(), ".jsonl")
    assert lengths(found) == [(10, 5), (20, 8), (15, 6)]


def test_turns_of_a_session_wait_for_the_answer(tmp_path: Path) -> None:
    lines = [
        {"session_id": "a", "timestamp": 0, "input_length": 600, "output_length": 50, "hash_ids": [1, 2]},
        {"session_id": "b", "timestamp": 1000, "input_length": 100, "output_length": 5, "hash_ids": [9]},
        {"session_id": "a", "delay": 2500, "input_length": 700, "output_length": 30, "hash_ids": [1, 3]},
    ]
    first, second = read(tmp_path, "\n".join(map(json.dumps, lines)).encode(), ".jsonl")
    assert [turn.think_s for turn in first.turns] == [0.0, 2.5]
    assert first.turns[1].parts[0] == first.turns[0].parts[0]
    assert len(second.turns) == 1


def test_of_a_huge_file_the_beginning_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localrun.plan.traces.MOST_REQUESTS", 1000)
    path = tmp_path / "huge.csv"
    path.write_text(
        "Timestamp,Request tokens,Response tokens\n" + "".join(f"{at / 4},100,10\n" for at in range(5000)) + "broken"
    )
    found = named(str(path))
    assert found.summary == "the first 1000 requests of a trace, 4 a second"
    assert len(found.sessions(5000, 1)) == 1000


def test_an_archive_that_is_cut_off_is_damaged(tmp_path: Path) -> None:
    whole = gzip.compress(("Time,input_tokens,output_tokens\n" + "".join(f"{at},9,9\n" for at in range(999))).encode())
    flipped = whole[:-8] + bytes(each ^ 255 for each in whole[-8:])
    for content in (whole[: len(whole) // 2], whole[:-4], flipped):
        with pytest.raises(BadRequest, match=r"trace\.csv\.gz is cut off or damaged"):
            read(tmp_path, content, ".csv.gz")


@pytest.mark.parametrize("per_s", [1, 10**3, 10**6, 10**9])
def test_dates_as_numbers_of_any_unit(tmp_path: Path, per_s: int) -> None:
    rows = [f"{(1_700_000_000 + at) * per_s},10,{at + 1}" for at in (0, 1, 4)]
    found = read(tmp_path, "\n".join(["Time,input_tokens,output_tokens", *rows]).encode())
    assert [each.at for each in found] == pytest.approx([0.0, 0.5, 2.0])  # 2 requests after the first, in 4 s
