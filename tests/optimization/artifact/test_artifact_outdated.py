"""Artifacts of older versions whose faults only optimizing again mends: they say so when they are loaded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import torchwright as tw
from in_process import own_cache
from small_artifacts import INPUT, edit, made, mlp
from torchwright.core.errors import OldArtifact
from torchwright.optimization.artifact import folder as artifact
from torchwright.optimization.artifact.load import outdated
from torchwright.optimization.engines.dispatch.spec import CallSpec, Guard, NumberDomain

NARROW = NumberDomain(values="finite")
CALL = CallSpec(name="forward", structure={"tuple": []}, tensors=())
GUARDED = CallSpec(
    name="forward", structure={"tuple": []}, tensors=(), guards=(Guard(tensor=0, values="finite"),)
)


def fault(path: Path, technique: str, calls: tuple[CallSpec, ...], domain: NumberDomain) -> str | None:
    recipe: Any = SimpleNamespace(steps=[SimpleNamespace(name=technique)])
    manifest: Any = SimpleNamespace(calls=calls)
    return outdated(path, recipe, manifest, domain)


@pytest.mark.parametrize(
    ("technique", "calls", "domain", "graph", "words"),
    [
        ("int8_dynamic", (CALL,), NumberDomain(), "choose_qparams.tensor", "rows of a batch influence"),
        ("int8_dynamic", (CALL,), NumberDomain(), "quantize_per_tensor.tensor", None),
        ("dtype", (CALL,), NumberDomain(), "choose_qparams.tensor", None),
        ("int8_static", (CALL,), NumberDomain(), "", "such as NaN"),
        ("int8_static", (GUARDED,), NumberDomain(), "", None),
        ("openvino", (CALL,), NARROW, "", "such as NaN"),
        ("openvino", (GUARDED, CALL), NARROW, "", None),
        ("openvino", (), NARROW, "", None),
    ],
)
def test_faults_of_older_versions_are_known(
    tmp_path: Path,
    technique: str,
    calls: tuple[CallSpec, ...],
    domain: NumberDomain,
    graph: str,
    words: str | None,
) -> None:
    (tmp_path / "programs.json").write_text(f'{{"target": "torch.ops.quantized_decomposed.{graph}"}}')
    found = fault(tmp_path, technique, calls, domain)
    assert (found is None) == (words is None)
    if words is not None:
        assert words in str(found)
        assert "optimize the model again" in str(found)


def test_loading_says_so_once_and_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    path = made(tmp_path, mlp(), ["onnxruntime"])
    own_cache(monkeypatch, tmp_path / "cache")

    def forget(manifest: Any) -> None:
        for call in manifest["calls"]:
            call["guards"] = []

    edit(path / artifact.MANIFEST, forget)
    with pytest.warns(OldArtifact, match="optimize the model again"):
        loaded = tw.load(path, trust=True)
    assert any("older version" in notice for notice in loaded.notices)
    torch.testing.assert_close(loaded.model(INPUT), mlp()(INPUT), rtol=1e-3, atol=1e-3)
