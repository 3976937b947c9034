"""Packages of a model whose arguments and results are dataclass instances and named tuples."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchwright as tw
from torchwright.core import nested
from torchwright.exporter.base import exports
from torchwright.exporter.package import PACKAGE
from torchwright.testing.instances import build, call

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.slow
@pytest.mark.parametrize("to", ["pt2", "onnx", "openvino"])
def test_a_package_takes_the_models_own_classes(tmp_path: Path, to: str) -> None:
    if reason := exports.get(to).unavailable():
        pytest.skip(reason)
    made = tw.export(build(), call(), to=to, out=tmp_path / to)
    assert made.report["verdict"].startswith("holds"), made.report["findings"]
    given = call(rows=3, seed=1)
    wanted = [leaf for leaf in nested.tensors(build()(**given)) if leaf.is_floating_point()]
    for found in (made.run(**given), made.run(*nested.tensors(given))):
        for one, other in zip(wanted, found, strict=True):
            torch.testing.assert_close(torch.as_tensor(other), one, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_pt2_archive_needs_neither_torchwright_nor_the_classes(tmp_path: Path) -> None:
    tw.export(build(), call(), to="pt2", out=tmp_path / "pt2")
    code = f"""if True:
        import sys, torch
        program = torch.export.load({str(tmp_path / "pt2" / PACKAGE / "model.pt2")!r}).module()
        wide = torch.ones(2, 128)
        batch = {{"x_BE": torch.ones(2, 64), "scale": 0.5, "mask_BF": wide, "extras": [wide]}}
        batch |= {{"sign": {{"MINUS": None}}, "level": {{"HIGH": None}}, "note": None}}
        batch["options"] = {{"deep": {{"factor": torch.ones(2, 64), "name": "text"}}, "none": None}}
        answer = program(batch=batch, pair=(wide, wide))
        assert answer["output"]["logits"].shape == (2, 64)
        assert "torchwright" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", code], check=True)
