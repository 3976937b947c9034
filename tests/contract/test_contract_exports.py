"""The contract of export targets: the tests are shipped, `pytest --pyargs torchwright.testing` runs them anywhere.

The template of docs/contributing/export-target.md is held against the same checks.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchwright.core import registry
from torchwright.exporter.base import exports
from torchwright.testing.test_exports import (
    TestDeclaration,
    TestPackage,
    check_choices,
    check_declaration,
    check_package,
    check_reasons,
    check_refusal,
    check_verified,
)

__all__ = ["TestDeclaration", "TestPackage"]

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "contributing" / "export-target.md"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path, in which the guide's template is installed under its entry point."""
    template, entry = re.findall(
        r"^```(?:python|toml)\n(.*?)^```$", GUIDE.read_text(), re.DOTALL | re.MULTILINE
    )
    (tmp_path / "numpy_target.py").write_text(template)
    information = tmp_path / "numpy_target-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy-target\nVersion: 1\n")
    named = re.findall(r'^(\w+) = "(.*)"$', entry, re.MULTILINE)
    (information / "entry_points.txt").write_text(
        "[torchwright.exports]\n" + "".join(f"{name} = {target}\n" for name, target in named)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    registry._installed.cache_clear()
    with exports.adding(dict(named)):
        yield tmp_path
    sys.modules.pop("numpy_target", None)
    registry._installed.cache_clear()


@pytest.mark.filterwarnings("ignore")
def test_the_guides_template_keeps_the_contract(site: Path) -> None:
    target = exports.get("numpy")
    check_declaration(target)
    check_reasons(target)
    check_choices(target)
    check_package(target, site)
    check_refusal(target, site)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_verifier_takes_the_guides_template(site: Path) -> None:
    check_verified(exports.get("numpy"), site)
