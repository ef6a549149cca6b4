"""Modelfiles: Ollama's format, and errors that name the line."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from localrun.errors import BadRequest
from localrun.models import modelfile
from localrun.models.modelfile import Line, MessageLine, parse

WHOLE = '''\
# a fox
from  ./fox model.gguf
PARAMETER temperature 0.5
parameter stop "<|im_end|>"
PARAMETER stop """two
lines"""
TEMPLATE """{% for m in messages %}{{ m.content }}{% endfor %}"""

SYSTEM """
You are
  a "fox"."""
SYSTEM "You are a fox."
MESSAGE user "hello there"
message assistant """multi
line"""
ADAPTER ./lora.gguf
DRAFT qwen3:0.6b
DRAFT ./small fox.gguf
LICENSE "MIT"
LICENSE Apache 2.0
REQUIRES 0.14.0
'''


def test_every_instruction() -> None:
    said = modelfile.parse(WHOLE)
    assert said.base == (2, "./fox model.gguf")
    assert [tuple(each) for each in said.parameters] == [
        (3, "temperature", "0.5"), (4, "stop", "<|im_end|>"), (5, "stop", "two\nlines"),
    ]  # fmt: skip
    assert said.template == (7, "{% for m in messages %}{{ m.content }}{% endfor %}")
    assert said.system == (12, "You are a fox.")
    assert [tuple(each) for each in said.messages] == [(13, "user", "hello there"), (14, "assistant", "multi\nline")]
    assert [line.text for line in said.adapters] == ["./lora.gguf"]
    assert [line.text for line in said.licences] == ["MIT", "Apache 2.0"]
    assert said.draft == (18, "./small fox.gguf")
    assert said.requires == (21, "0.14.0")


def test_a_text_in_three_quotes_is_taken_as_it_is() -> None:
    said = modelfile.parse('FROM x\nSYSTEM """\n a\n# no comment\nFROM y "quoted" """\n')
    assert said.system == (2, '\n a\n# no comment\nFROM y "quoted" ')
    assert modelfile.parse('FROM x\nSYSTEM """"fox""""').system == (2, '"fox"')
    assert modelfile.parse("\ufeffFROM x\r\nSYSTEM hi\r\n").system == (2, "hi")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no FROM line"),
        ("SYSTEM hi", "no FROM line"),
        ("FROM", "line 1 .*FROM"),
        ("\nFROM x\nFROM y\nPROJECTOR z", "line 4 .*second projector.*line 3.*line 2"),
        ("FROM x\nform y", "line 2 .*'form' is no instruction; did you mean 'FROM'"),
        ("FROM x\nPICTURE y", "line 2 .*'PICTURE'.*FROM, PROJECTOR"),
        ("FROM x\nPARAMETER temperature", "line 2 .*PARAMETER temperature"),
        ('FROM x\nSYSTEM """open\n\n', "line 2 .*SYSTEM.*not closed"),
        ('FROM x\nSYSTEM """a\nb""" c\n', "line 3 .*'c'"),
        ('FROM x\nSYSTEM "open', "line 2 .*not closed"),
        ("FROM x\nMESSAGE dog hi", "line 2 .*MESSAGE: 'dog'.*system, user, assistant"),
        ("FROM x\nMESSAGE user", "line 2 .*MESSAGE user"),
        ("FROM x\nDRAFT", "line 2 .*DRAFT has no value"),
    ],
)
def test_errors_name_the_line(text: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message) as caught:
        modelfile.parse(text)
    assert caught.value.field == "modelfile"


@given(st.text(max_size=300))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        said = modelfile.parse(text)
    except BadRequest:
        return
    assert said.base.text


_TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=60).filter(
    lambda text: '"""' not in text and not text.endswith('"')
)


@example(system="a\r\nb", template="0\r\n", stops=["\r\n"], message="\r", draft="0")
@example(system="0", template="0", stops=["\t", "x "], message="0", draft="a b.gguf")
@given(system=_TEXTS, template=_TEXTS, stops=st.lists(_TEXTS, max_size=3), message=_TEXTS, draft=_TEXTS)
def test_what_is_written_is_read_back(system: str, template: str, stops: list[str], message: str, draft: str) -> None:
    written = modelfile.write(
        base="/a b/fox.gguf",
        draft=draft,
        template=template,
        parameters={"temperature": 0.5, "use_mmap": True, "stop": stops},
        system=system,
        messages=[("user", message)],
        licence="MIT",
        requires="0.14.0",
    )
    said = modelfile.parse(written)
    assert said.base.text == "/a b/fox.gguf"
    assert said.draft is not None
    assert said.draft.text == draft
    assert (said.template and said.template.text, said.system and said.system.text) == (template, system)
    assert [each.text for each in said.parameters if each.name == "stop"] == stops
    assert [each.text for each in said.parameters if each.name != "stop"] == ["0.5", "true"]
    assert [(each.role, each.text) for each in said.messages] == [("user", message)]


# --- parameters ---


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [("temperature", "0.5", 0.5), ("num_ctx", "4096.0", 4096), ("top_k", "40", 40), ("use_mmap", "True", True),
     ("stop", "<|x|>", "<|x|>"), ("seed", "-1", -1), ("speculation", "off", False), ("speculation", "On", True)],
)  # fmt: skip
def test_values(name: str, text: str, value: Any) -> None:
    assert modelfile.parameter_value(name, text) == value
    assert type(modelfile.parameter_value(name, text)) is type(value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("temperature", "hot"),
        ("use_mmap", "maybe"),
        ("speculation", "maybe"),
        ("num_ctx", "inf"),
        ("top_k", "nan"),
        ("heat", "1"),
    ],
)
def test_what_is_no_value(name: str, text: str) -> None:
    with pytest.raises(BadRequest, match=name):
        modelfile.parameter_value(name, text)


def test_what_a_switch_may_be_is_said_as_the_documents_say_it() -> None:
    with pytest.raises(BadRequest, match=r"^speculation is 'maybe', which is not on, off, true or false$"):
        modelfile.parameter_value("speculation", "maybe")


def test_parameters_are_kept_in_one_form() -> None:
    given = {"temperature": 1, "stop": "a", "top_k": "40", "num_ctx": 2048.0, "use_mmap": False, "tfs_z": 1.0}
    given["seed"] = None
    assert modelfile.normalized_parameters(given) == {
        "temperature": 1.0, "stop": ["a"], "top_k": 40, "num_ctx": 2048, "use_mmap": False,
    }  # fmt: skip
    for wrong in ({"heat": 1}, {"temperature": True}, {"stop": 1.5j}, {"use_mmap": [1]}):
        with pytest.raises(BadRequest):
            modelfile.normalized_parameters(wrong)


def test_what_ollama_writes_in_one_pair_of_quotes_goes_over_several_lines():
    found = parse(
        'FROM "./m y.gguf"\nSYSTEM "You are a pirate.\n  # You say arr.\n"\nLICENSE "MIT\n\nCopyright"\n'
        'PARAMETER stop "a\nb"\nMESSAGE user "hi\nho "ho" ho"\nTEMPLATE "{{ x }}"\nPARAMETER top_k 3'
    )
    assert found.base == Line(1, "./m y.gguf")
    assert found.system == Line(2, "You are a pirate.\n  # You say arr.\n")
    assert found.licences == (Line(5, "MIT\n\nCopyright"),)
    assert [parameter.text for parameter in found.parameters] == ["a\nb", "3"]
    assert found.messages == (MessageLine(10, "user", 'hi\nho "ho" ho'),)
    assert found.template == Line(12, "{{ x }}")


def test_a_quote_that_nothing_closes_is_told_by_the_line_that_opens_it():
    with pytest.raises(BadRequest, match=r"line 2 .* SYSTEM: the text in quotes is not closed"):
        parse('FROM tiny\nSYSTEM "You are\na pirate.\nPARAMETER top_k 3')


def test_tabs_are_blanks():
    found = parse("FROM\ttiny\nPARAMETER temperature\t0.5\nPARAMETER\t num_ctx\t\t2048\nMESSAGE user\thello\tyou")
    assert [(each.name, each.text) for each in found.parameters] == [("temperature", "0.5"), ("num_ctx", "2048")]
    assert found.messages == (MessageLine(4, "user", "hello\tyou"),)


def test_later_shards_are_found_by_the_first_and_are_no_projectors():
    names = [f"sh/F-Q8_0-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    found = parse("".join(f"FROM {name}\n" for name in [*names, "mmproj-F.gguf"]))
    assert found.base == Line(1, names[0])
    assert found.projector == Line(4, "mmproj-F.gguf")


def test_a_projector_may_come_before_its_model():
    found = parse("FROM ./mmproj-model-f16.gguf\nFROM ./qwen2-vl.gguf")
    assert (found.base, found.projector) == (Line(2, "./qwen2-vl.gguf"), Line(1, "./mmproj-model-f16.gguf"))
