"""Follow a journey through the house: which rooms it enters, and which call which, counted over all its processes.

    python scripts/journeys.py optimize|train|serve|chat [--source src]

A room is a folder of `src/torchwright`, or a file that stands in none. An arrow is a call from a function of one room
to a function of another. `sys.setprofile` records it in every process that the journey starts. Generated code and
imports are left out. With `--source` another checkout is followed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path

RECORDER = """
import os, sys, threading
root, out, phase = os.environ["JOURNEY_ROOT"], os.environ["JOURNEY_OUT"], os.environ["JOURNEY_PHASE"]
rooms, seen = {}, set()
def room(name):
    if name not in rooms:
        inside = name[len(root):].split("/") if name.startswith(root) else None
        rooms[name] = inside and (inside[0] if len(inside) > 1 else inside[0].removesuffix(".py"))
    return rooms[name]
def record(frame, event, arg):
    if event != "call" or frame.f_code.co_name == "<module>":
        return
    there = room(frame.f_code.co_filename)
    if there is None:
        return
    back = frame.f_back
    while back is not None and room(back.f_code.co_filename) is None:
        back = back.f_back
    if back is None or back.f_code.co_name == "<module>":
        return
    here = room(back.f_code.co_filename)
    if here != there and (here, there) not in seen and os.path.exists(phase):
        seen.add((here, there))
        with open(out, "a") as file:
            file.write(f"{here} {there}\\n")
sys.setprofile(record)
threading.setprofile(record)
"""

COMMAND = [sys.executable, "-c", "from torchwright.cli import main; main()"]
PORT = 8917
MODULE = """
import torch, torchwright as tw
if __name__ == "__main__":
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 256))
    result = tw.optimize(model, torch.randn(8, 256), time_budget=90.0, progress=False)
    result.save("out")
"""
RUN = """
out = "out"
tokens = 2048
batch_tokens = 512
context = 64
[model]
folder = "{folder}"
[data]
train = ["corpus.txt"]
"""


def follow(journey: str, source: Path) -> Counter[tuple[str, str]]:
    """The arrows of a journey, each once for every process that drew it."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "hook").mkdir()
        (place / "hook" / "sitecustomize.py").write_text(RECORDER)
        (place / "journey.py").write_text(MODULE)
        phase, out = place / "phase", place / "arrows"
        out.touch()
        environment = os.environ | {
            "PYTHONPATH": f"{place / 'hook'}:{source.resolve()}",
            "JOURNEY_ROOT": f"{source.resolve()}/torchwright/",
            "JOURNEY_OUT": str(out),
            "JOURNEY_PHASE": str(phase),
        }
        if journey != "chat":
            phase.touch()
        match journey:
            case "optimize":
                subprocess.run([sys.executable, "journey.py"], cwd=place, env=environment, check=True)
            case "train":
                (place / "RUN.toml").write_text(
                    RUN.format(folder=source.resolve() / "torchwright" / "workloads" / "bundled")
                )
                (place / "corpus.txt").write_text("A ship was wrecked upon a coast of rocks. " * 400)
                command = [*COMMAND, "train", "RUN.toml"]
                subprocess.run(command, cwd=place, env=environment, check=True)
            case _:
                _serve(place, environment, phase, chat=journey == "chat")
        return Counter(tuple(line.split()) for line in out.read_text().splitlines())  # type: ignore[misc]


def _serve(place: Path, environment: dict[str, str], phase: Path, *, chat: bool) -> None:
    command = [*COMMAND, "serve", "--port", str(PORT)]
    server = subprocess.Popen(command, cwd=place, env=environment)
    try:
        while not _answers("/ready"):
            if server.poll() is not None:
                sys.exit(f"the server ended with exit code {server.returncode}")
            time.sleep(0.5)
        if chat:
            phase.touch()
            body = {"model": "bundled", "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 8}
            models = json.loads(urllib.request.urlopen(f"http://127.0.0.1:{PORT}/v1/models").read())
            body["model"] = models["data"][0]["id"]
            request = urllib.request.Request(
                f"http://127.0.0.1:{PORT}/v1/chat/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            urllib.request.urlopen(request).read()
    finally:
        server.terminate()
        server.wait()


def _answers(path: str) -> bool:
    try:
        return urllib.request.urlopen(f"http://127.0.0.1:{PORT}" + path).status == 200
    except OSError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("journey", choices=["optimize", "train", "serve", "chat"])
    parser.add_argument("--source", type=Path, default=Path(__file__).parents[1] / "src")
    options = parser.parse_args()
    arrows = follow(options.journey, options.source)
    rooms = {room for arrow in arrows for room in arrow}
    both = sorted({tuple(sorted(arrow)) for arrow in arrows if arrow[::-1] in arrows})
    print(
        f"{options.journey}: {len(rooms)} rooms, {len(arrows)} arrows, {len(both)} pairs that call each other"
    )
    for here in sorted({here for here, _ in arrows}):
        print(f"  {here:16} → {', '.join(sorted(there for other, there in arrows if other == here))}")
    for pair in both:
        print(f"  both ways: {pair[0]}, {pair[1]}")


if __name__ == "__main__":
    main()
