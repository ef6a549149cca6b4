"""The pages of `/docs`: the OpenAPI document as one readable page, and the documentation.

The reference is made once; the address in its examples is put in by the route, which knows by what name it was reached.
The documentation's pages are Markdown files of the package, also to be read where the sources are; each begins with a
heading, its title, and its name is that of the file. All are HTML documents without anything from elsewhere, light or
dark as the reader's system is.
Does not: know a route that the document does not have, or fetch or run anything.
"""

from __future__ import annotations

import json
import re
from functools import cache
from html import escape
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, NamedTuple

from localrun.errors import NotFound
from localrun.server.http.operation import JSON, Family
from localrun.server.openapi.document import Json, common
from localrun.server.openapi.refusals import REFUSALS

# No script runs and nothing is loaded, whatever a page says.
CONTENT_POLICY = b"default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def page(title: str, content: str) -> str:
    """A whole document. `content` is HTML, `title` is text."""
    style = resources.files("localrun.server.openapi").joinpath("page.css").read_text(encoding="utf-8")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{style}</style></head>'
        f"<body>{content}</body></html>"
    )


_LIMITS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
    "minProperties": "at least {} entries",
    "maxProperties": "at most {} entries",
    "pattern": "matches {}",
}


def anchor(name: str) -> str:
    return f"shape-{name}"


def type_html(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f'<a href="#{anchor(name)}">{escape(name)}</a>'
    if "anyOf" in schema:
        kinds = [type_html(one) for one in schema["anyOf"] if one != {"type": "null"}]
        return " or ".join(kinds) or "null"
    if "enum" in schema:
        return " | ".join(f"<code>{escape(str(value))}</code>" for value in schema["enum"])
    if "const" in schema:
        return f"<code>{escape(json.dumps(schema['const']))}</code>"
    kind = schema.get("type")
    if kind == "array" and "prefixItems" in schema:
        return f"list of {', '.join(type_html(one) for one in schema['prefixItems'])}"
    if kind == "array":
        shown = f"list of {type_html(schema.get('items', {}))}"
    elif kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        shown = f"object of {type_html(schema['additionalProperties'])}"
    else:
        shown = escape(str(kind)) if kind else "anything"
    limits = [words.format(escape(_number(schema[name]))) for name, words in _LIMITS.items() if name in schema]
    return shown + (f' <span class="limit">{", ".join(limits)}</span>' if limits else "")


def default_html(schema: dict[str, Any]) -> str:
    """The default of a field. Empty if there is none, or if it is null, since the note says then what happens."""
    default = schema.get("default")
    return "" if default is None else f" = <code>{escape(json.dumps(default))}</code>"


def _number(value: Any) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


# The page that lists all others.
INDEX = "README"
_FOLDER = resources.files("localrun") / "docs"
# What only leads somewhere where the sources are: pictures, and pages of other folders.
_PICTURE = re.compile(r"!\[[^\]]*\]\([^)]*\)")
_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]*\)")
_PAGE_LINK = re.compile(r"\]\(([a-z-]+|README)\.md(#[^)]*)?\)")


class DocsPage(NamedTuple):
    """One page of the documentation. `text` is Markdown."""

    name: str
    title: str
    text: str


@cache
def pages() -> tuple[DocsPage, ...]:
    found = (file for file in _FOLDER.iterdir() if file.name.endswith(".md"))
    return tuple(_read_page(file) for file in sorted(found, key=lambda file: file.name))


def _read_page(file: Traversable) -> DocsPage:
    text = file.read_text(encoding="utf-8")
    return DocsPage(file.name.removesuffix(".md"), text.partition("\n")[0].lstrip("# "), text)


@cache
def rendered(name: str) -> str:
    """A page as an HTML document. Raises NotFound."""
    # Not at the top: no start of a daemon has to wait for it.
    from markdown_it import MarkdownIt

    for one in pages():
        if one.name == name:
            text = _PAGE_LINK.sub(r"](\1\2)", _OUTSIDE.sub(r"\1", _PICTURE.sub("", one.text)))
            # HTML in the text is shown as text.
            content = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
            return page(f"localrun: {one.title}", f'<p><a href="../docs">localrun: API</a></p>{_with_anchors(content)}')
    listed = ", ".join(one.name for one in pages())
    raise NotFound(f"there is no page '{name[:40]}'; there are {listed}", field="name")


def _with_anchors(content: str) -> str:
    """Links within and between the pages lead to headings by their words, as they do where the sources are."""
    return re.sub(
        r"<h([23])>(.*?)</h\1>",
        lambda found: f'<h{found[1]} id="{_anchor(found[2])}">{found[2]}</h{found[1]}>',
        content,
    )


def _anchor(heading: str) -> str:
    words = re.sub(r"<[^>]+>|&\w+;", "", heading).lower()
    return re.sub(r"[^\w-]", "", words.replace(" ", "-"))


# Stands for the base URL in the cached page.
BASE_URL = "{base-url}"
_CODE = re.compile(r"`([^`]+)`")


def reference(described: Json) -> str:
    """The whole page, with BASE_URL in its examples."""
    parts = [_head(described), *(_family(family, described) for family in Family), _shapes(described)]
    return page("localrun: API", "".join(parts))


def _head(described: Json) -> str:
    info = described["info"]
    families = "".join(f'<li><a href="#{_slug(family)}">{escape(family)}</a></li>' for family in Family)
    docs = "".join(f'<li><a href="/docs/{one.name}">{escape(one.title)}</a></li>' for one in pages())
    return (
        f"<h1>localrun {escape(info['version'])}</h1><p>{escape(info['summary'])} "
        f'The same for programs: <a href="/openapi.json">/openapi.json</a> (OpenAPI {described["openapi"]}).</p>'
        f"<p>Base URL here: <code>{BASE_URL}</code>; for OpenAI clients <code>{BASE_URL}/v1</code>, with any API key. "
        f"Web pages must send JSON with <code>Content-Type: application/json</code>. Unknown fields are ignored.</p>"
        f'<nav><ul>{families}<li><a href="#shapes">Shapes</a></li></ul>'
        f"<h2>Documentation</h2><ul>{docs}</ul></nav>"
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
    names = sorted(properties, key=lambda name: (name not in required, name in common()))
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
