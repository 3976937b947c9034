"""Languages by name and by code."""

from __future__ import annotations

import pytest

from torchwright.core.errors import UnknownName
from torchwright.models.speech.languages import language_code


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("English", "en"),
        ("en", "en"),
        ("GERMAN", "de"),
        ("castilian", "es"),
        ("Haitian Creole", "ht"),
        ("haitian_creole", "ht"),
    ],
)
def test_names_and_codes_in_any_case(name, code):
    assert language_code(name, ["de", "en", "es", "ht"]) == code


def test_the_nearest_name_is_offered():
    with pytest.raises(UnknownName, match=r"'Englsh'; did you mean 'English'\?") as caught:
        language_code("Englsh", ["en", "de"])
    assert "en (English)" in str(caught.value)
    with pytest.raises(UnknownName, match="unknown language 'French'"):
        language_code("French", ["en", "de"])
