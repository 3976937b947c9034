"""Forged graphs of OpenVINO and ONNX Runtime in trusted artifacts: loaded, or refused by an `ArtifactError`.

Each mutant is opened in a forked child. Neither library promises to withstand a forger, so a crash of the library is
counted and is no fault of ours: without trust no such graph is read.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
import graphs

import torchwright as tw
from converted_models import needs
from small_artifacts import INPUT, made, mlp, seal

LIBRARIES = ("openvino", "onnxruntime")
SECONDS = 60.0
pytestmark = pytest.mark.filterwarnings("ignore")


def fuzz(name: str, count: int, seed: int, work: Path) -> None:
    """Load mutants of an artifact; print how many were loaded, refused, or crashed the library."""
    needs(name)
    code, said = graphs.in_child(lambda: made(work, mlp(), [name]) and None, 10 * SECONDS)
    assert code == graphs.DONE, said
    chance, counts = random.Random(seed), Counter[str]()
    for index in range(count):
        copy = Path(shutil.copytree(work / "artifact", work / "copy"))
        what = graphs.break_graph(copy / name, chance)
        seal(copy)
        code, said = graphs.in_child(lambda: _load(copy), SECONDS)  # noqa: B023
        assert code != graphs.WRONG, f"mutant {index} of seed {seed}, {what}: {said}"
        counts[{graphs.DONE: "loaded", graphs.REFUSED: "refused"}.get(code, f"signal {-code}")] += 1
        shutil.rmtree(copy)
    print(f"\n{count} graphs of {name}, seed {seed}: {dict(sorted(counts.items()))}")


def _load(folder: Path) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    tw.load(folder, trust=True).model(INPUT)


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_few_forged_graphs(name: str, tmp_path: Path) -> None:
    fuzz(name, 10, 0, tmp_path)


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", LIBRARIES)
def test_hundreds_of_forged_graphs(name: str, tmp_path: Path) -> None:
    fuzz(name, 500, 1, tmp_path)
