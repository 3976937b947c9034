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
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
import graphs
import onnx_files

import torchwright as tw
from converted_models import needs
from small_artifacts import INPUT, made, mlp, seal

LIBRARIES = ("openvino", "onnxruntime")
SECONDS = 60.0
MEMORY = 4 * 2**30
"""Bytes that a graph may take; the good one takes a few million."""
pytestmark = pytest.mark.filterwarnings("ignore")


def fuzz(name: str, count: int, seed: int, work: Path, record: Callable[[str, object], None]) -> None:
    """Load mutants of an artifact; record how many were loaded, refused, or crashed the library, by their change."""
    needs(name)
    code, said = graphs.in_child(lambda: made(work, mlp(), [name]) and None, 10 * SECONDS)
    assert code == graphs.DONE, said
    chance, counts = random.Random(seed), Counter[tuple[str, str]]()
    faults: dict[str, str] = {}
    for index in range(count):
        copy = Path(shutil.copytree(work / "artifact", work / "copy"))
        what = graphs.break_graph(copy / name, chance)
        seal(copy)
        code, said = graphs.in_child(lambda: _load(copy), SECONDS)  # noqa: B023
        how = {graphs.DONE: "loaded", graphs.REFUSED: "refused", graphs.WRONG: "wrong"}.get(
            code, f"signal {-code}"
        )
        counts[what, how] += 1
        if code == graphs.WRONG or (what in onnx_files.BEYOND and code != graphs.REFUSED):
            faults.setdefault(f"{what}, {how}", f"mutant {index} of seed {seed}: {said}")
        shutil.rmtree(copy)
    lines = [f"{what}: {how} {number}" for (what, how), number in sorted(counts.items())]
    record("counts", f"{count} graphs of {name}, seed {seed}: " + ", ".join(lines))
    assert not faults, "\n\n".join(f"{what}: {fault}" for what, fault in sorted(faults.items()))


def _load(folder: Path) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    graphs.limit_memory(MEMORY)
    tw.load(folder, trust=True).model(INPUT)


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_few_forged_graphs(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    fuzz(name, 10, 0, tmp_path, record_property)


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", LIBRARIES)
def test_hundreds_of_forged_graphs(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    fuzz(name, 500, 1, tmp_path, record_property)
