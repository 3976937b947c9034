"""Ids of requests, answers and files."""

from __future__ import annotations

import secrets


def new_id(prefix: str) -> str:
    """Return an id that nothing else has and nobody can guess."""
    return f"{prefix}{secrets.token_hex(12)}"
