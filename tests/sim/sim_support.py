"""A process that finds the simulated devices installed, by their entry points."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "packages" / "sim"
POINTS = """[torch.backends]
sim = torchwright_sim:autoload
[torchwright.devices]
sim = torchwright_sim.torchwright_device:Sim
"""


def install(site: Path) -> dict[str, str]:
    """Return the environment of a process that finds the package installed, as `pip install` leaves it."""
    information = site / "torchwright_sim-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: torchwright-sim\nVersion: 1\n")
    (information / "entry_points.txt").write_text(POINTS)
    path = [str(site), str(PACKAGE), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path)), "PYTEST_ADDOPTS": ""}


def run(
    environment: dict[str, str], *command: str, settings: str = "", check: bool = True, seconds: float = 280
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments and this TORCHWRIGHT_SIM."""
    done = subprocess.run(
        [sys.executable, *command],
        env=environment | {"TORCHWRIGHT_SIM": settings},
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds,
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done
