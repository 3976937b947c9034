"""examples/abacus: a backend of another package (PrivateUse1), from a search on it to an artifact that is loaded."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "abacus"
MOST_LINES = 60
"""Lines of a device's class, with its imports: what another package has to write."""
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
    result = tw.optimize(model, (x,), device="abacus", techniques=["dtype"], max_drop=0.5, progress=False)
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
    site = tmp_path_factory.mktemp("site")
    information = site / "torchwright_abacus-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: torchwright-abacus\nVersion: 1\n")
    (information / "entry_points.txt").write_text("[torchwright.devices]\nabacus = abacus:Abacus\n")
    path = [str(site), str(EXAMPLE), os.environ.get("PYTHONPATH", "")]
    built = {"TORCH_EXTENSIONS_DIR": str(tmp_path_factory.mktemp("built"))}
    return os.environ | built | {"PYTHONPATH": os.pathsep.join(filter(None, path))}


def run(environment: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, check=False
    )


def test_a_device_of_another_package_is_a_small_class():
    text = (EXAMPLE / "abacus" / "__init__.py").read_text()
    assert len(text.splitlines()) <= MOST_LINES
    (found,) = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef))
    assert not [node for node in found.body if isinstance(node, ast.FunctionDef)]


@pytest.mark.slow  # the backend is compiled, and a search runs
def test_from_a_search_to_an_artifact_in_a_new_process(installed: dict[str, str], tmp_path: Path):
    out = tmp_path / "out"
    search, load = tmp_path / "search.py", tmp_path / "load.py"
    search.write_text(MODEL + SEARCH)
    load.write_text(MODEL + LOAD)
    done = run(installed, str(search), str(out))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["device"] == "an abacus"
    assert [name for name, _ in told["steps"]] == ["dtype"]
    assert "failed" not in {status for _, status in told["steps"]}
    assert "same device" in told["refused"]

    done = run(installed, str(load), str(out))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told == {
        "from_cpu": "cpu",
        "from_there": "abacus",
        "another_batch": [3, 4],
        "close": True,
        "default": told["default"],
    }
    assert told["default"] != "abacus"

    # Without the package nothing of it is needed to say so; with it, the server still does not drive it.
    plain = run(dict(os.environ), str(load), str(out))
    assert plain.returncode != 0
    assert "unknown device 'abacus'" in plain.stderr
    served = run(installed, "-m", "torchwright", "serve", str(out))
    assert served.returncode == 2
    assert "Traceback" not in served.stderr
    assert "an artifact for the device 'abacus'" in " ".join(served.stderr.split())

    doctor = run(installed, "-m", "torchwright", "doctor", "--device", "abacus", "--json")
    assert doctor.returncode == 0, doctor.stderr
    found = json.loads(doctor.stdout)
    assert found["device"]["name"] == "an abacus"
    assert found["device"]["memory_bytes"] == 1 << 30
    reasons = {each["name"]: each["reason"] for each in found["techniques"]}
    assert reasons["dtype"] is None
    assert reasons["compile"] == "no compiler makes code for an abacus"
    assert "this device is abacus" in reasons["native"]
