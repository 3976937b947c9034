"""The OpenAPI document against the real server: requests made from it, good and bad, never meet a fault."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from http_support import Command, command
from hypothesis import HealthCheck, settings

from torchwright.serve.http.app import OPERATIONS
from torchwright.serve.http.openapi import document

pytestmark = pytest.mark.slow
"""`test_http_server` and `test_http_fields` refuse bad requests by hand."""
ERRORS = {"message", "type", "param", "code"}


@pytest.fixture(scope="module")
def server() -> Iterator[Command]:
    # A short context, because what is made may ask for as many tokens as fit.
    with command("--max-context", "48") as running:
        yield running


schema = schemathesis.openapi.from_dict(document(OPERATIONS, keys=False))
schema.config.phases.coverage.enabled = False  # a thousand requests for each operation


@schema.parametrize()
@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_requests_made_from_the_document_meet_no_fault(server: Command, case: Any) -> None:
    response = case.call(base_url=server.url, timeout=60)
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        assert response.json()["error"].keys() == ERRORS
