"""The API in words, from the classes that read the requests: the page at /docs and the tables of docs/serve.md."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from torchwright.serve.http.openapi import Operation, document
from torchwright.serve.openai.parse import Body
from torchwright.serve.openai.protocol import Shared

PAGE = Path(__file__).parent / "page" / "docs.htm"
HEAD = ("parameter", "type", "default", "meaning")


@cache
def page(operations: Sequence[Operation], *, keys: bool) -> str:
    """The page that shows the OpenAPI document: no script, and nothing that is loaded from anywhere."""
    text = PAGE.read_text("utf-8").replace("<!-- operations -->", "".join(map(_section, operations)))
    whole = json.dumps(document(operations, keys=keys), indent=2, ensure_ascii=False)
    return text.replace("<!-- document -->", escape(whole))


def fields(body: type[Body]) -> list[tuple[str, str, str, str]]:
    """One request's fields as rows of `HEAD`; those that all generating requests share come after its own."""
    found, schema = body.model_fields, body.model_json_schema()
    own = [name for name in found if name not in Shared.model_fields]
    return [
        (
            name,
            _type(schema["properties"][name], schema),
            _default(found[name]),
            found[name].description or "",
        )
        for name in [*own, *(name for name in found if name not in own)]
    ]


def _taken(body: type[Body]) -> list[tuple[str, str, str, str]]:
    """Return rows of `HEAD` for what is taken and does nothing: the schema has it, the class does not."""
    schema = body.model_json_schema()
    own = {field.alias or name for name, field in body.model_fields.items()}
    return [
        (name, _type(found, schema), "null", found["description"])
        for name, found in schema["properties"].items()
        if name not in own
    ]


def _section(operation: Operation) -> str:
    path = re.sub(r"\{(\w+):\w+\}", r"{\1}", operation.path)
    also = f" Also: {', '.join(map(escape, operation.also))}." if operation.also else ""
    head = f"<b>{operation.method}</b> <code>{escape(path)}</code> <span>{escape(operation.summary)}</span>"
    if operation.body is None:
        return f"<section><h2>{head}</h2><p>{also.strip()}</p></section>\n"
    rows = "".join(_row("td", row) for row in (*fields(operation.body), *_taken(operation.body)))
    table = f"<div><table><thead>{_row('th', HEAD)}</thead><tbody>{rows}</tbody></table></div>"
    details = f"<details><summary>The fields of its body, {operation.body.media_type}.{also}</summary>{table}</details>"
    return f"<section><h2>{head}</h2>{details}</section>\n"


def _row(cell: str, values: Iterable[str]) -> str:
    return "<tr>" + "".join(f"<{cell}>{escape(value)}</{cell}>" for value in values) + "</tr>"


def _type(schema: dict[str, Any], whole: dict[str, Any]) -> str:
    """A JSON schema in a few words: its type and its bounds."""
    if "$ref" in schema:
        return _type(whole["$defs"][schema["$ref"].rpartition("/")[2]], whole)
    if alternatives := schema.get("anyOf") or schema.get("oneOf"):
        found = [_type(item, whole) for item in alternatives if item.get("type") != "null"]
        return " or ".join(dict.fromkeys(found))
    if "enum" in schema or "const" in schema:
        return ", ".join(json.dumps(value) for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        most = f", at most {schema['maxItems']}" if "maxItems" in schema else ""
        item = _type(schema.get("items", {}), whole)
        return f"list of {item if 'enum' in schema.get('items', {}) else item.partition(',')[0]}{most}"
    lower = schema.get("minimum", schema.get("exclusiveMinimum"))
    upper = schema.get("maximum", schema.get("exclusiveMaximum"))
    kind = str(schema.get("type", "any"))
    if kind not in ("integer", "number") or (lower is None and upper is None):
        return kind
    above = "over " if "exclusiveMinimum" in schema else ""
    return f"{kind}, {above}{lower} to {upper}" if upper is not None else f"{kind}, {above}{lower} or more"


def _default(field: FieldInfo) -> str:
    return "required" if field.is_required() else json.dumps(field.get_default())
