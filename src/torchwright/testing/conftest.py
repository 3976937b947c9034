"""Marks of the contract tests, for where they are run without this project's settings."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "sweep: every technique through the engine that runs it, for minutes; leave out by -m 'not sweep'",
    )
