"""packages/sim: the scorecard of the simulated device, and of one with seeded faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sim_support import install, run

SHARES = {"forward": 0.97, "gradient": 0.95, "modules": 0.97, "optimizers": 1.0}
"""The least shares of passed samples."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return install(tmp_path_factory.mktemp("site"))


def card(installed: dict[str, str], match: str, settings: str = "") -> dict[str, Any]:
    words = ["-m", "torchwright", "doctor", "--device", "sim", "--operators", "--json", "--match", match]
    return json.loads(run(installed, *words, settings=settings).stdout)


@pytest.mark.slow
def test_seeded_faults_are_named(installed: dict[str, str]) -> None:
    faults = "fault=wrong@aten::sinh,fault=crash@aten::erfinv,fault=abort@aten::digamma"
    found = card(installed, "^(sinh|erfinv|digamma|cosh)$", faults)
    assert {
        (fault["entry"], fault["outcome"]) for fault in found["faults"] if fault["family"] == "forward"
    } == {
        ("sinh", "wrong"),
        ("erfinv", "crashed"),
        ("digamma", "crashed"),
    }


@pytest.mark.sweep
@pytest.mark.timeout(3600)
def test_the_simulated_device_passes(installed: dict[str, str], tmp_path: Path) -> None:
    words = ["-m", "torchwright", "doctor", "--device", "sim", "--operators", "--json"]
    found = json.loads(run(installed, *words, seconds=3500).stdout)
    for family, (passed, total) in found["shares"].items():
        assert passed >= SHARES[family] * total > 0, found["faults"]
