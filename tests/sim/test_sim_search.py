"""packages/sim: a search on a simulated device, in processes of its own, and what is made of its result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sim_support import install, run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
]  # a search in seven processes, and what loads its artifact

SEARCH = """
import json
import sys
import torch
from torch import nn
import torchwright as tw

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
x = torch.randn(8, 16)
if __name__ == "__main__":
    limits = {"max_drop": 0.5, "time_budget": 20, "techniques": ["dtype"]}
    result = tw.optimize(model, (x,), device="sim", progress=False, **limits)
    result.save(sys.argv[1])
    fast, there = result.model, x.to("sim")
    refused = None
    try:
        model(there)
    except RuntimeError as error:
        refused = str(error)
    print(json.dumps({
        "device": result.recipe.fingerprint.device.kind,
        "tried": [rung.step.name for rung in result.steps],
        "from_cpu": fast(x).device.type,
        "from_sim": fast(there).device.type,
        "close": torch.allclose(fast(x), model(x), atol=0.1),
        "refused": refused,
        "default": tw.hardware.devices.default_name(),
    }))
"""


def test_a_search_and_its_artifact(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    installed = install(site)
    script, artifact = tmp_path / "search.py", tmp_path / "out"
    script.write_text(SEARCH)
    told = json.loads(run(installed, str(script), str(artifact), seconds=800).stdout.splitlines()[-1])
    assert (told["device"], told["tried"]) == ("sim", ["dtype"])
    assert (told["from_cpu"], told["from_sim"], told["close"]) == ("cpu", "sim", True)
    assert "same device" in told["refused"]
    assert told["default"] != "sim"
    served = run(installed, "-m", "torchwright", "serve", str(artifact), check=False)
    assert served.returncode == 2
    assert "an artifact for the device 'sim'" in " ".join(served.stderr.split())
