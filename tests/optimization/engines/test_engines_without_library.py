"""An artifact of a third-party engine on a machine that lacks its library: the carried graphs answer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import torchwright as tw
from converted_models import needs
from small_artifacts import INPUT, made, mlp
from torchwright.core.errors import ArtifactError, SlowerCall
from torchwright.optimization.engines.base import engines

OTHERS = ("openvino", "onnxruntime")


def _hide(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Have the libraries of an engine not be installed."""
    for library in engines.get(name).libraries:  # pyright: ignore[reportAttributeAccessIssue]
        monkeypatch.setitem(sys.modules, library, None)  # pyright: ignore[reportArgumentType]
    assert engines.get(name).unavailable()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("trust", [True, False])
@pytest.mark.parametrize("name", OTHERS)
def test_the_carried_graphs_answer_any_batch_and_name_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, trust: bool
) -> None:
    needs(name)
    path = made(tmp_path, mlp(), [name])
    with monkeypatch.context() as patch:
        _hide(patch, name)
        with pytest.warns(SlowerCall, match=rf"pip install 'torchwright\[{name}\]'"):
            loaded = tw.load(path, trust=trust)
        assert (loaded.how, loaded.measured) == ("graphs, uncompiled", None)
        assert any(f"torchwright[{name}]" in notice for notice in loaded.notices)
        for rows in (1, 4, 9):
            x = INPUT.repeat(3, 1)[:rows]
            torch.testing.assert_close(loaded.model(x), mlp()(x), rtol=1e-5, atol=1e-6)
        with pytest.raises(ArtifactError, match="cannot run here"):
            tw.load(path, model=mlp(), trust=trust)  # whose weights the graphs do not have
