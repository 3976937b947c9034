"""What several tests of the search change in their techniques."""

import pytest

from search_techniques import Quantize


@pytest.fixture
def errors_add(monkeypatch: pytest.MonkeyPatch) -> None:
    """The errors of `quantize`'s layers add up, so that a ranking says how many layers to leave alone."""
    monkeypatch.setattr(Quantize, "errors_add", True)
