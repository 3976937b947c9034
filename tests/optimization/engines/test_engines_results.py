"""Results of a library's own classes: kept in a graph, built again in a process that has not imported the library."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torchwright.core.errors import ArtifactError
from torchwright.hardware.devices import get_device
from torchwright.optimization.engines.apply import make_target
from torchwright.optimization.engines.compiled.program import export
from torchwright.optimization.engines.converted import handed_over
from torchwright.optimization.engines.dispatch.results import result_builder
from torchwright.optimization.engines.safety.graph_check import structure
from torchwright.workloads.module import ModuleWorkload

BUILD = """
import sys
import torch
from torchwright.optimization.engines.dispatch.results import result_builder

library, text = sys.argv[1:]
assert library not in sys.modules
print(type(result_builder(text)([torch.zeros(2)])).__name__)
"""


def of_class(name: str, *keys: str) -> str:
    leaf = {"type": None, "context": None, "children_spec": []}
    return json.dumps([1, {"type": name, "context": json.dumps(keys), "children_spec": [leaf for _ in keys]}])


def test_a_denoisers_result_is_kept() -> None:
    """diffusers' models return classes of its own, as transformers' do."""
    models = pytest.importorskip("diffusers")
    model = models.PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, num_layers=1, sample_size=8, cross_attention_dim=16,
        caption_channels=8, in_channels=4, out_channels=8, norm_num_groups=2,
    ).eval()  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "encoder_hidden_states": torch.randn(2, 5, 8),
        "timestep": torch.full((2,), 500.0),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }
    workload = ModuleWorkload(model, inputs)
    target = make_target(workload, get_device("cpu").identify())
    ((name, program),) = export(target.model, workload.graphs(torch.float32)).items()
    spec = handed_over(name, program)
    with torch.no_grad():
        wanted = model(**inputs)
    found = result_builder(structure(spec.nesting))([wanted.sample])
    assert type(found) is type(wanted)
    assert found.sample is wanted.sample


CLASSES = {
    "transformers.modeling_outputs.BaseModelOutput": "last_hidden_state",
    "diffusers.models.modeling_outputs.Transformer2DModelOutput": "sample",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_a_class_of_a_library_that_was_not_imported(name: str, tmp_path: Path) -> None:
    library = name.partition(".")[0]
    pytest.importorskip(library)
    words = [sys.executable, "-W", "ignore", "-c", BUILD, library, of_class(name, CLASSES[name])]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.split() == [name.rpartition(".")[2]], done.stderr


@pytest.mark.parametrize("name", ["transformers.strange.Output", "owned_module.Output"])
def test_a_class_that_nobody_knows_is_named_and_not_imported(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "owned_module.py").write_text("import pathlib; pathlib.Path('owned').touch()")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ArtifactError, match=f"not known in this process. Found: {name}") as caught:
        result_builder(of_class(name, "x"))
    assert "import the module" in str(caught.value)
    assert "owned_module" not in sys.modules
