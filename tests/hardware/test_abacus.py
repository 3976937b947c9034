"""examples/abacus: a backend of another package (PrivateUse1), from a search on it to an artifact that is loaded."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.utils.cpp_extension import is_ninja_available

EXAMPLE = Path(__file__).parents[2] / "examples" / "abacus"
MOST_LINES = 60
"""Lines of a device's class, with its imports: what another package has to write."""
BACKEND = """
import copy
import pytest
import torch
from torch import nn
import abacus.backend

torch.manual_seed(0)
model, x = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU()), torch.randn(5, 6)
wanted, there = model(x), x.to("abacus")
assert there.device == torch.device("abacus", 0)
for one, other in ((model, there), (copy.deepcopy(model).to("abacus"), x)):
    with pytest.raises(RuntimeError, match="same device"):
        one(other)
with pytest.raises(TypeError, match="Tensor.cpu"):
    there.numpy()
placed = copy.deepcopy(model).to("abacus")
found = placed(there)
found.sum().backward()
wanted.sum().backward()
assert placed[0].weight.grad.device.type == "abacus"
close = lambda a, b: torch.testing.assert_close(a.detach().cpu(), b.detach())
close(found, wanted)
close(placed[0].weight.grad, model[0].weight.grad)
close(copy.deepcopy(there), x)
close(there[1:, ::2].t().contiguous(), x[1:, ::2].t())
close(there.view(30)[7:9], x.view(30)[7:9])
close(there.to(torch.bfloat16), x.to(torch.bfloat16))
close(torch.export.export(placed, (there,)).module()(there), wanted)
with torch.inference_mode():
    close(placed(there), wanted)
attention = nn.functional.scaled_dot_product_attention
query = torch.randn(2, 3, 4, 8)
close(attention(*[query.to("abacus")] * 3), attention(query, query, query))
torch.abacus.reset_peak_memory_stats()
before = torch.abacus.max_memory_allocated()
large = torch.empty(1 << 20, device="abacus")
assert torch.abacus.max_memory_allocated() == before + (4 << 20)
del large
assert torch.abacus.max_memory_allocated() == before + (4 << 20)
assert torch.abacus.mem_get_info()[0] == (1 << 30) - before
"""
MODEL = """
import json
import sys
import torch
from torch import nn
import torchwright as tw

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 4))
x = torch.randn(8, 16)
"""
SEARCH = """
if __name__ == "__main__":
    limits = {"max_drop": 0.5, "time_budget": 20, "techniques": ["dtype"]}
    result = tw.optimize(model, (x,), device="abacus", progress=False, **limits)
    result.save(sys.argv[1])
    refused = None
    try:
        model(x.to("abacus"))
    except RuntimeError as error:
        refused = str(error)
    steps = [(rung.step.name, rung.status) for rung in result.steps]
    print(json.dumps({"device": result.recipe.fingerprint.device.name, "steps": steps, "refused": refused}))
"""
LOAD = """
fast = tw.load(sys.argv[1]).model
print(json.dumps({
    "from_cpu": fast(x).device.type,
    "from_there": fast(x.to("abacus")).device.type,
    "another_batch": list(fast(x[:3]).shape),
    "close": torch.allclose(fast(x), model(x), atol=0.1),
    "default": tw.hardware.devices.default_name(),
}))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that finds the example installed, by its entry point, with its backend built."""
    if not is_ninja_available():
        pytest.skip("ninja, with which torch builds C++ extensions, is not installed")
    site = tmp_path_factory.mktemp("site")
    information = site / "torchwright_abacus-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: torchwright-abacus\nVersion: 1\n")
    (information / "entry_points.txt").write_text("[torchwright.devices]\nabacus = abacus:Abacus\n")
    path = [str(site), str(EXAMPLE), os.environ.get("PYTHONPATH", "")]
    built = {"TORCH_EXTENSIONS_DIR": str(tmp_path_factory.mktemp("built"))}  # unless one is set already
    return built | os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))}


@pytest.fixture(scope="module")
def artifact(
    installed: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """An artifact of a search on the device, and what the search's process said."""
    folder = tmp_path_factory.mktemp("search")
    (folder / "search.py").write_text(MODEL + SEARCH)
    done = run(installed, str(folder / "search.py"), str(folder / "out"))
    assert done.returncode == 0, done.stderr
    return folder / "out", json.loads(done.stdout.splitlines()[-1])


def run(environment: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, check=False
    )


def test_a_device_of_another_package_is_a_small_class():
    text = (EXAMPLE / "abacus" / "__init__.py").read_text()
    assert len(text.splitlines()) <= MOST_LINES
    (found,) = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef))
    assert not [node for node in found.body if isinstance(node, ast.FunctionDef)]


@pytest.mark.slow  # the backend is compiled
def test_the_backend_computes_what_the_cpu_does_and_mixes_with_nothing(installed: dict[str, str]):
    done = run(installed, "-c", BACKEND)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow  # a search
def test_a_search_runs_on_it(artifact: tuple[Path, dict[str, Any]]):
    _, told = artifact
    assert told["device"] == "an abacus"
    assert [name for name, _ in told["steps"]] == ["dtype"]
    assert "failed" not in {status for _, status in told["steps"]}
    assert "same device" in told["refused"]


@pytest.mark.slow  # on the search above
def test_its_artifact_is_loaded_in_a_new_process(
    installed: dict[str, str], artifact: tuple[Path, dict[str, Any]], tmp_path: Path
):
    out, _ = artifact
    load = tmp_path / "load.py"
    load.write_text(MODEL + LOAD)
    done = run(installed, str(load), str(out))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told.pop("default") != "abacus"
    assert told == {"from_cpu": "cpu", "from_there": "abacus", "another_batch": [3, 4], "close": True}
    without = run(dict(os.environ), str(load), str(out))
    assert without.returncode != 0
    assert "unknown device 'abacus'" in without.stderr


@pytest.mark.slow  # on the search above
def test_its_artifact_is_not_served(installed: dict[str, str], artifact: tuple[Path, dict[str, Any]]):
    served = run(installed, "-m", "torchwright", "serve", str(artifact[0]))
    assert served.returncode == 2
    assert "Traceback" not in served.stderr
    assert "an artifact for the device 'abacus'" in " ".join(served.stderr.split())


@pytest.mark.slow  # on the backend above
def test_doctor_says_what_runs_on_it(installed: dict[str, str]):
    doctor = run(installed, "-m", "torchwright", "doctor", "--device", "abacus", "--json")
    assert doctor.returncode == 0, doctor.stderr
    found = json.loads(doctor.stdout)
    assert (found["device"]["name"], found["device_fault"]) == ("an abacus", None)
    assert found["device"]["memory_bytes"] == 1 << 30
    reasons = {each["name"]: each["reason"] for each in found["techniques"]}
    assert reasons["dtype"] is None
    assert reasons["compile"] == "no compiler makes code for an abacus"
    assert "this device is abacus" in reasons["native"]
