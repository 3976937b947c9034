"""The bundled language model: an artifact beside fp32 eager at prefill and decode, and what it costs to start.

python benchmarks/bundled_lm.py [ARTIFACT] [--max-drop 0.01] [--time-budget SECONDS] [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import turns
from torchwright.optimization.api import optimize_cli
from torchwright.optimization.artifact.folder import open_artifact
from torchwright.workloads.language import LanguageWorkload

STARTS = 5
LOAD = "import torch, torchwright as tw; tw.load({path!r})"
"""`tw.load` runs the self-test: it ends with a first result."""
IMPORT = "import torch"


def main() -> None:
    parser = argparse.ArgumentParser(description="The bundled language model, optimized, beside fp32 eager.")
    parser.add_argument(
        "artifact", nargs="?", help="an artifact of the bundled model; made here when left out"
    )
    parser.add_argument("--max-drop", type=float, default=0.01, help="accuracy budget (default: %(default)s)")
    parser.add_argument(
        "--time-budget", type=float, default=150.0, help="seconds of search (default: %(default)s)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    options = parser.parse_args()
    turns.print_machine()
    with tempfile.TemporaryDirectory() as folder:
        path = options.artifact or f"{folder}/artifact"
        if not options.artifact:
            turns.say("optimizing")
            optimize_cli(
                None,
                max_drop=options.max_drop,
                objective="latency",
                time_budget=options.time_budget,
                batch=None,
                prompt_tokens=None,
                new_tokens=None,
                tokens=None,
                eval_text=None,
                with_steps=(),
                without=(),
                device=None,
                out=path,
                seed=0,
                on_event=lambda event: None,
                command="benchmarks/bundled_lm.py",
            )
        row = measure(path)
    for key, value in row.items():
        print(f"{key}: {value}")
    turns.write_json(options.json, [row])


def measure(path: str) -> dict[str, Any]:
    recipe, _ = open_artifact(Path(path))
    described = recipe.workload
    workload = LanguageWorkload(
        batch=described["batch"],
        prompt_tokens=described["prompt_tokens"],
        new_tokens=described["new_tokens"],
    )
    with turns.contenders() as start:
        eager = start("eager", workload)
        reference = turns.observe(eager)
        ours = start("torchwright", workload, artifact=path, reference=reference)
        if ours.failure:
            return {"failure": ours.failure}
        timed = turns.take_turns([eager, ours])
    assert ours.quality is not None
    row: dict[str, Any] = {"recipe": turns.recipe_of(path)}
    for case in ("prefill", "decode"):
        before, after = (statistics.median(timed.seconds(name, case)) for name in ("eager", "torchwright"))
        row[case] = (
            f"{timed.speedup('eager', 'torchwright', case)}, {1e3 * before:.2f} ms to {1e3 * after:.2f} ms"
        )
    row |= {"metric": ours.quality.metric, "drop": ours.quality.drop, "drop_high": ours.quality.drop_high}
    turns.say("starting new processes")
    plain, loading = [], []
    for _ in range(STARTS):
        plain.append(run_seconds(IMPORT))
        loading.append(run_seconds(LOAD.format(path=str(Path(path).resolve()))))
    beyond = statistics.median(b - a for a, b in zip(plain, loading, strict=True))
    compiled = [rung.compile_seconds for rung in recipe.rungs if rung.kept and rung.compile_seconds]
    row |= {"first_result_beyond_importing_torch_s": round(beyond, 2), "import_torch_s": round(min(plain), 2)}
    if compiled:
        row |= {
            "cold_compile_s": round(compiled[-1], 2),
            "load_over_compile": round(beyond / compiled[-1], 3),
        }
    return row


def run_seconds(code: str) -> float:
    """Seconds of a new process that runs `code`."""
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
