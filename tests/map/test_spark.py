"""docs/map.md: the recipe for Spark, as it stands, on two cores of this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from pyarrow import parquet

from folders import encoder, sentence_transformer
from text_artifacts import eager_artifact
from torchwright.cli import main
from torchwright.workloads.encoder import EncoderWorkload

DOCS = Path(__file__).parents[2] / "docs" / "map.md"
ROWS = 300
BEGIN = """
from pyspark.sql import SparkSession

spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
texts = spark.read.json("in.jsonl").repartition(3)
"""
END = """
spark.stop()
"""
pytestmark = [
    pytest.mark.slow,  # a Java machine, and Python workers that start torch
    pytest.mark.timeout(900),
    pytest.mark.skipif(not find_spec("pyspark"), reason="pyspark is not installed"),
    pytest.mark.skipif(
        not shutil.which("java") and "JAVA_HOME" not in os.environ, reason="Java is not installed"
    ),
]


def recipe(artifact: Path) -> str:
    """Return the page's code, with an artifact that there is."""
    section = DOCS.read_text("utf-8").split("\n## Spark\n")[1].split("\n## ")[0]
    [code] = re.findall(r"```python\n(.*?)```", section, re.S)
    assert code.count("/models/out-minilm") == 1
    return code.replace("/models/out-minilm", str(artifact))


def vectors(path: Path) -> dict[int, list[float]]:
    table = parquet.read_table(path)
    return dict(zip(table["id"].to_pylist(), table["embedding"].to_pylist(), strict=True))


def test_the_recipe_gives_the_vectors_of_map(tmp_path: Path) -> None:
    folder = sentence_transformer(tmp_path / "encoder", encoder(), pooling={"pooling_mode_mean_tokens": True})
    artifact = eager_artifact(EncoderWorkload(folder), tmp_path / "artifact")
    rows = [{"id": n, "text": f"row {n} " * (1 + n % 7)} for n in range(ROWS)]
    source = tmp_path / "in.jsonl"
    faulty = [{"id": ROWS, "text": " "}, {"id": ROWS + 1, "text": None}]
    source.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *faulty]))
    (tmp_path / "spark.py").write_text(BEGIN + recipe(artifact) + END)
    environment = {
        **os.environ,
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    done = subprocess.run(
        [sys.executable, "spark.py"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert main(["map", str(artifact), str(source), "-o", str(tmp_path / "map.parquet"), "--quiet"]) == 0
    ours, sparks = vectors(tmp_path / "map.parquet"), vectors(tmp_path / "vectors")
    assert sparks.keys() == ours.keys() == set(range(ROWS))
    for number, vector in ours.items():
        np.testing.assert_allclose(sparks[number], vector, atol=1e-6)
