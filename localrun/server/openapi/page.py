"""`/docs`: the OpenAPI document as one readable page, with what is refused and where the editors' pages are.

Pure: made once. The address in the examples is put in by the route, which knows by what name it was reached.

Does not: know a route that the document does not have.
"""

from __future__ import annotations

import json
import re
from functools import cache
from html import escape
from typing import Any

from localrun.server.openapi import editor_pages
from localrun.server.openapi.document import Json, document
from localrun.server.openapi.field_notes import COMMON
from localrun.server.openapi.operation import JSON, Family
from localrun.server.openapi.page_frame import page
from localrun.server.openapi.refusals import REFUSALS
from localrun.server.openapi.schema_text import anchor, default_html, type_html

# Stands for the base URL in the cached page.
BASE_URL = "{base-url}"
_CODE = re.compile(r"`([^`]+)`")


@cache
def reference() -> str:
    """The whole page, with BASE_URL in its examples."""
    described = document()
    parts = [_head(described), *(_family(family, described) for family in Family), _shapes(described)]
    return page("localrun: API", "".join(parts))


def _head(described: Json) -> str:
    info = described["info"]
    families = "".join(f'<li><a href="#{_slug(family)}">{escape(family)}</a></li>' for family in Family)
    editors = f'<li><a href="/docs/editors/{editor_pages.INDEX}">All of them</a></li>' + "".join(
        f'<li><a href="/docs/editors/{one.name}">{escape(one.title)}</a></li>' for one in editor_pages.pages()
    )
    return (
        f"<h1>localrun {escape(info['version'])}</h1><p>{escape(info['summary'])} "
        f'The same for programs: <a href="/openapi.json">/openapi.json</a> (OpenAPI {described["openapi"]}).</p>'
        f"<p>Base URL here: <code>{BASE_URL}</code>; for OpenAI clients <code>{BASE_URL}/v1</code>, with any API key. "
        f"JSON bodies need <code>Content-Type: application/json</code>. Unknown fields are ignored.</p>"
        f'<nav><ul>{families}<li><a href="#shapes">Shapes</a></li></ul>'
        f"<h2>Set up an editor</h2><ul>{editors}</ul></nav>"
    )


def _family(family: Family, described: Json) -> str:
    parts = [f'<section><h2 id="{_slug(family)}">{escape(family)}</h2>']
    for path, methods in described["paths"].items():
        parts += [
            _operation(path, method, operation, described)
            for method, operation in methods.items()
            if operation["tags"] == [family.value]
        ]
    refused = [one for one in REFUSALS if one.family is family]
    if refused:
        rows = "".join(f"<tr><td>{_text(one.what)}</td><td>{_text(one.why)}</td></tr>" for one in refused)
        parts.append(
            f'<h3 id="refused-{_slug(family)}">Refused</h3>'
            f"<p>Known, not possible, and never silently ignored: an error names the field.</p>"
            f'<div class="wide"><table><tr><th>What</th><th>Why, or what to do</th></tr>{rows}</table></div>'
        )
    return "".join([*parts, "</section>"])


def _operation(path: str, method: str, operation: Json, described: Json) -> str:
    parts = [
        f'<details id="{operation["operationId"]}"><summary><span class="method">{method.upper()}</span>'
        f"<b>{escape(path)}</b> {escape(operation['summary'])}</summary>"
    ]
    if operation.get("description"):
        parts.append(f"<p>{_text(operation['description'])}</p>")
    for place, heading in (("path", "Path"), ("query", "Query"), ("header", "Headers")):
        rows = [
            _row(one["name"], one["schema"], one.get("description", ""), is_required=one.get("required", False))
            for one in operation.get("parameters", ())
            if one["in"] == place
        ]
        parts.append(_table(heading, rows))
    body = operation.get("requestBody")
    if body is not None:
        parts.append(_body(body, described))
    parts.append(_responses(operation["responses"]))
    parts.append(f"<pre>{escape(_curl(path, method, body))}</pre></details>")
    return "".join(parts)


def _body(body: Json, described: Json) -> str:
    ((content_type, content),) = body["content"].items()
    schema = content.get("schema")
    if schema is None:
        return f"<p>Body: {escape(content_type)}</p>"
    name = schema["$ref"].rpartition("/")[2]
    return _table("Body", _rows(described["components"]["schemas"][name]))


def _responses(responses: Json) -> str:
    rows = []
    for status, answer in responses.items():
        shapes = [
            f"{escape(kind)}: {type_html(content.get('x-item-schema', content.get('schema', {})))}"
            for kind, content in answer.get("content", {}).items()
        ]
        rows.append(f"<tr><td>{status}</td><td>{_text(answer['description'])}</td><td>{'<br>'.join(shapes)}</td></tr>")
    return _table("Answers", rows)


def _shapes(described: Json) -> str:
    parts = ['<section><h2 id="shapes">Shapes</h2>']
    for name, schema in described["components"]["schemas"].items():
        parts.append(f'<details id="{anchor(name)}"><summary><b>{escape(name)}</b></summary>')
        parts.append(f"<p>{_text(schema.get('description', ''))}</p>")
        parts.append(_table("", _rows(schema)) if "properties" in schema else f"<p>{type_html(schema)}</p>")
        parts.append("</details>")
    return "".join([*parts, "</section>"])


def _rows(schema: Json) -> list[str]:
    """Required fields first, what many routes take last."""
    required = schema.get("required", ())
    properties = schema.get("properties", {})
    names = sorted(properties, key=lambda name: (name not in required, name in COMMON))
    return [
        _row(name, properties[name], properties[name].get("description", ""), is_required=name in required)
        for name in names
    ]


def _row(name: str, schema: Json, note: str, *, is_required: bool) -> str:
    mark = " <b>required</b>" if is_required else ""
    kind = type_html(schema) + default_html(schema)
    return f"<tr><td><code>{escape(name)}</code>{mark}</td><td>{kind}</td><td>{_text(note)}</td></tr>"


def _table(heading: str, rows: list[str]) -> str:
    if not rows:
        return ""
    title = f"<h3>{heading}</h3>" if heading else ""
    return f'{title}<div class="wide"><table>{"".join(rows)}</table></div>'


def _curl(path: str, method: str, body: Json | None) -> str:
    url = f"{BASE_URL}{path}"
    words = ["curl", url] if method == "get" else ["curl", "--head", url] if method == "head" else [
        "curl", "-X", method.upper(), url
    ]  # fmt: skip
    command = " ".join(words)
    if body is None:
        return command
    ((content_type, content),) = body["content"].items()
    if content_type != JSON:
        return f"{command} -H 'Content-Type: {content_type}' --data-binary @FILE"
    example: Any = content.get("example", {})
    # In single quotes of a shell nothing but the quote itself has a meaning.
    data = json.dumps(example, ensure_ascii=False).replace("'", "'\\''")
    return f"{command} \\\n  -H 'Content-Type: {JSON}' \\\n  -d '{data}'"


def _text(text: str) -> str:
    """Escaped, with what stands between backquotes as code."""
    return _CODE.sub(r"<code>\1</code>", escape(text, quote=False))


def _slug(family: Family) -> str:
    return family.name.lower()
