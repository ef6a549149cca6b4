"""What a model said is what is seen: no word of an answer is dropped, whatever it stands in."""

from __future__ import annotations

import re
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrun.tui.widgets.messages import parser

# `%` is a word. Letters of any markup are lower-case words without digits.
_PIECES = st.sampled_from(
    [
        *("%", "**%**", "*% %*", "~~%~~", "`%`", "`<%>`", "[%](http://a/)", "Vec<%>", "<%>", "</%>", "<% x='%'>"),
        *(
            "a <b % and % c> d",
            "<!-- % -->",
            "<br>%",
            "[%]",
            "[%][%]",
            "\\(%\\)",
            "\\[%\\]",
            "{%}",
            "&%;",
            "_%_",
            "%_%",
        ),
        *("*%, **%", "$%$", "![%](http://a/b.png)", "%<%", "x<y>%", "<https://a/%>", "\\<%\\>", "<![CDATA[%]]>"),
    ]
)
_LINES = st.lists(_PIECES, min_size=1, max_size=4).map(" ".join)
_PROSE = st.lists(_LINES, min_size=1, max_size=3).map("\n".join)
_BLOCKS = st.one_of(
    _PROSE,
    _LINES.map(lambda line: f"# {line}"),
    _LINES.map(lambda line: f"[%]: {line}"),
    _LINES.map(lambda line: f"[^1]: {line}"),
    _PROSE.map(lambda text: f"<answer>\n{text}\n</answer>"),
    _PROSE.map(lambda text: f"<style>\n{text}"),
    _PROSE.map(lambda text: f"<!--\n{text}"),
    _PROSE.map(lambda text: f"<pre>\n\n{text}\n</pre>"),
    _PROSE.map(lambda text: f"```html\n{text}\n```"),
    _PROSE.map(lambda text: f"- {text.replace(chr(10), chr(10) + '- ')}"),
    _PROSE.map(lambda text: f"> {text.replace(chr(10), chr(10) + '> ')}"),
    _PROSE.map(lambda text: f"1. %\n\n    {text.replace(chr(10), chr(10) + '    ')}"),
    st.just("| % | % |\n|---|---|\n| %<br>% | <%> |\n| `%` | **%** |"),
    st.just("---\n%: %\n---"),
)
_DOCUMENT = st.lists(_BLOCKS, min_size=1, max_size=5).map("\n\n".join)


def seen(markdown: str) -> str:
    """The text that the widget gets to draw."""
    parts: list[str] = []
    for token in parser().parse(markdown):
        if token.type in ("fence", "code_block"):
            parts.append(token.content)
        parts += ["\n" if child.type == "hardbreak" else child.content for child in token.children or ()]
        parts.append("\n")
    return "".join(parts)


@settings(max_examples=300)
@given(_DOCUMENT, st.floats(0, 1))
def test_every_word_is_seen_in_order_also_of_a_part(document: str, part: float) -> None:
    numbers = count(10_000)
    whole = re.sub("%", lambda _: f"w{next(numbers)}", document)
    for text in (whole, whole[: int(len(whole) * part)]):
        said = re.findall(r"w\d{5}", re.sub(r"\(http://[^)]*\)", "", text))
        assert re.findall(r"w\d{5}", seen(text)) == said, text


@pytest.mark.parametrize(
    ("markdown", "text"),
    [
        ("if a <b and c> d then x<y>z.", "if a <b and c> d then x<y>z."),
        ("| x<br>y<BR/>z | `<br>` |\n|---|---|", "x\ny\nz\n<br>"),
        ("Write <br> here", "Write <br> here"),
        ("roses\nviolets", "roses\nviolets"),
        ("[Speaker]: Hello\n[1]: http://a", "[Speaker]: Hello\n[1]: http://a"),
        (r"\(x^2\) and \[y\] \* \_", r"\(x^2\) and \[y\] * _"),
        ("3*4*5, a*b*c, x**2 + y**2, f(*args, **kwargs)", "3*4*5, a*b*c, x**2 + y**2, f(*args, **kwargs)"),
        ("**S**ingle **R**esponsibility, *so*", "Single Responsibility, so"),
        (r"\[not a link\](http://a)", r"\[not a link\](http://a)"),
        ("so\n\\[\na *b* c\n\\]", "so\n\\[\na *b* c\n\\]"),
        (r"\{x\} C:\\dir \# __two words__", r"\{x\} C:\\dir # two words"),
        ("costs $5 and *some* $6", "costs $5 and some $6"),
    ],
)
def test_what_is_text_and_what_breaks_lines(markdown: str, text: str) -> None:
    assert re.sub(r"\n+", "\n", seen(markdown)).strip("\n") == text


@pytest.mark.parametrize(
    ("markdown", "bold"),
    [
        ("これは**「重要」**な点です。", ["「重要」"]),
        ("**「A」**なので**「B」**", ["「A」", "「B」"]),
        ("**真。**她**真：**她**真”**她", ["真。", "真：", "真”"]),
        ("这是**“取出”（take）模式**。", ["“取出”（take）模式"]),
        ("**중요(important)**합니다", ["중요(important)"]),
        ("日本** 語**", []),
        ("plain **bold.** and **(so)**x", ["bold."]),
    ],
)
def test_marks_beside_letters_that_have_no_blanks_between_words(markdown: str, bold: list[str]) -> None:
    (_, line, _) = parser().parse(markdown)
    assert line.children is not None
    kinds = [child.type for child in line.children]
    found = [at for at, kind in enumerate(kinds) if kind == "strong_open"]
    assert [line.children[at + 1].content for at in found] == bold


_SAID = r"""f(*args, **kwargs)|char *p|2*3*4|x**2 + y**2|src/**/*.js|*.py|a_b_c|__init__|5 > 3|<T>|Vec<String>|C#|#1|:)
~5 to ~10|$x_i^*$|\(a*b*c\)|don't|日本語|AT&T|[x]|(y)|a / b|-|+1|1.5|100 %|*|**|/* no */|C:\dir|<input>|$$a_1 * b_1$$"""


@given(st.lists(st.sampled_from(re.split(r"[|\n]", _SAID)), min_size=1, max_size=8).map(" ".join))
def test_signs_of_programs_and_formulas_stay(said: str) -> None:
    assert [line for line in seen(f"so {said}\n\n> - so {said}").split("\n") if line] == [f"so {said}"] * 2
