"""Every way in which a template can fail becomes one clear reply."""

from __future__ import annotations

import pytest

from localrun.server.templates.frames import RenderReply, RenderRequest
from localrun.server.templates.worker import answer


def _answer(template: str, content: object = "hi", output_bytes: int = 100_000) -> RenderReply:
    variables = {"messages": [{"role": "user", "content": content}]}
    return answer(
        RenderRequest(
            template=template, variables=variables, control_tokens=("<s>",), output_bytes=output_bytes, cpu_s=10
        )
    )


@pytest.mark.parametrize(
    ("template", "code", "words"),
    [
        ("{{ raise_exception('no system role') }}", "bad_request", "no system role"),
        ("{% if %}", "bad_template", "line 1"),
        ("ok\n{% for x in %}", "bad_template", "line 2"),
        ("{{ ''.__class__ }}", "bad_template", "sandbox"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "bad_template", "too deeply"),
        ("{{ missing.attribute }}", "bad_template", "missing"),
        ("{{ messages[0].content + 1 }}", "bad_template", "TypeError"),
        ("{% for i in range(10**9) %}{% endfor %}", "bad_template", "Range too big"),
        ("{% include 'other' %}", "bad_template", "failed"),
        ("{{ 'x' * 200000 }}", "bad_template", "100000 bytes"),
        ("{{ 1 // 0 }}", "bad_template", "ZeroDivisionError"),
    ],
)
def test_failures_are_named(template, code, words):
    reply = _answer(template)
    assert reply.segments == ()
    assert reply.error_code == code
    assert words in reply.error_message


def test_a_long_message_from_a_template_is_shortened():
    assert len(_answer("{{ raise_exception('x' * 100000) }}").error_message) < 1000


def test_typed_control_tokens_are_untrusted_and_the_templates_are_not():
    reply = _answer("<s>{{ messages[0].content }}", content="a<s>b")
    assert [(segment.text, segment.trusted) for segment in reply.segments] == [
        ("<s>a", True),
        ("<s>", False),
        ("b", True),
    ]
