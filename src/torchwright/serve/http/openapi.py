"""The OpenAPI document, made from the classes that read the requests."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from torchwright.serve.http.service import Service
from torchwright.serve.openai.parse import Body

REFUSALS = {
    "400": "A field is wrong, unknown or not supported",
    "401": "The API key is missing or wrong",
    "403": "The host or page is none of the server's",
    "404": "The model is not the served one",
    "405": "The method is not for this path",
    "408": "The body did not come in time",
    "409": "The batch has ended, or a batch reads the file",
    "413": "The body is too large",
    "415": "The body is not of the type that the path takes",
    "429": "Too many requests wait; Retry-After says when to come again",
    "500": "A fault in the server",
    "503": "The engine is not ready, or died; the request can be sent again",
}
ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        },
    },
}
Handler = Callable[[Service, Request], Awaitable[Response]]


@dataclass(frozen=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    handler: Handler
    """Its name is the operation's id."""
    summary: str
    body: type[Body] | None = None
    before_ready: bool = False
    """True if it also answers while the engine is not ready; other routes return 503 then, before they read
    anything.
    """
    also: tuple[str, ...] = ()
    """Other servers' names of the path, or older ones."""

    @property
    def name(self) -> str:
        return self.handler.__name__


def document(operations: Sequence[Operation], *, keys: bool) -> dict[str, Any]:
    """The document as plain data; `keys` says whether requests need an API key."""
    bodies = [operation.body for operation in operations if operation.body is not None]
    _, schemas = models_json_schema(
        [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        path = re.sub(r"\{(\w+):\w+\}", r"{\1}", operation.path)
        paths.setdefault(path, {})[operation.method.lower()] = _operation(operation, path)
    components: dict[str, Any] = {"schemas": {**schemas.get("$defs", {}), "Error": ERROR}}
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Torchwright", "version": version("torchwright")},
        "paths": paths,
        "components": components,
    }
    if keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
    return found


def _operation(operation: Operation, path: str) -> dict[str, Any]:
    refused = {
        status: {
            "description": text,
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
        }
        for status, text in REFUSALS.items()
    }
    found: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "responses": {"200": {"description": "The answer"}, **refused},
    }
    if operation.name in ("health", "ready"):
        found["responses"]["503"] = {"description": "Not now"}
    if names := re.findall(r"\{(\w+)\}", path):
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if operation.body is not None:
        schema = {"$ref": f"#/components/schemas/{operation.body.__name__}"}
        found["requestBody"] = {"required": True, "content": {operation.body.media_type: {"schema": schema}}}
    return found
