"""Fine-tuning the bundled model to facts that it cannot know: this trainer against transformers and peft by hand, and
against TRL's `SFTTrainer`.

    pip install peft trl
    python benchmarks/finetune.py [--turns N] [--steps S] [--threads T] [--json FILE]

Each contender is a process of its own with the same windows in the same order, fused AdamW, bf16 autocast, and for
adapters r = 16 on all linear layers over weights in bfloat16. They make some steps in turn; ratios are medians over the
turns with 95% intervals. Before and after, each is asked for every fact and has to give it exactly. What is not
installed is left out in words.
"""

from __future__ import annotations

import argparse
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import turns
from finetune_peers import Job, by_hand, trl
from torchwright.hardware.measure.clock import paired_speedup

BUNDLED = Path(__file__).parents[1] / "src" / "torchwright" / "workloads" / "bundled"
CONTEXT, BATCH_TOKENS, FACTS = 128, 1024, 24
RANK = 16
RATES = {"full": 1e-3, "lora": 5e-3}
WORDS = [
    "socket",
    "json",
    "thread",
    "path",
    "queue",
    "regex",
    "codec",
    "tuple",
    "frame",
    "token",
    "slice",
    "class",
]
FACTS_OF = [f"{one} {other}" for one, other in zip(WORDS, WORDS[1:] + WORDS[:1], strict=True)] + WORDS
OURS: dict[str, dict[str, Any] | None] = {
    "torchwright full": None,
    "torchwright LoRA": {"r": RANK},
    "torchwright LoRA, compiled": {"r": RANK},
    "torchwright QLoRA (nf4)": {"r": RANK, "base": "nf4"},
}
NEEDS = {"transformers full": "transformers", "peft LoRA": "peft", "TRL full": "trl", "TRL LoRA": "trl"}
"""Contender → the package that it is made of."""
NAMES = (*OURS, *NEEDS)
RATIOS = tuple(
    (ours, theirs)
    for ours in OURS
    for theirs in (("transformers full", "TRL full") if OURS[ours] is None else ("peft LoRA", "TRL LoRA"))
)


def facts() -> dict[str, str]:
    """Question → answer: numbers that nobody could guess."""
    draw = random.Random(0)
    return {f"The code of the {name} is": f" {draw.randrange(1000, 10000)}." for name in FACTS_OF[:FACTS]}


def write_data(folder: Path) -> None:
    """Every fact a hundred times, in another order each time."""
    draw, lines = random.Random(1), []
    for _ in range(100):
        order = list(facts().items())
        draw.shuffle(order)
        lines += [question + answer for question, answer in order]
    (folder / "facts.txt").write_text("\n".join(lines))


def ours(name: str, folder: Path) -> tuple[Callable[[], float], torch.nn.Module]:
    """A step of `torchwright train`, and what answers."""
    from torchwright.train.ledger import Ledger
    from torchwright.train.run.processes import processes
    from torchwright.train.run.read import parse_run
    from torchwright.train.run.trainer import Trainer

    out = folder / name.replace(" ", "-")
    out.mkdir()
    kind = "full" if OURS[name] is None else "lora"
    run = parse_run(
        {
            "out": ".",
            "tokens": 10**9,
            "batch_tokens": BATCH_TOKENS,
            "context": CONTEXT,
            "peak_tflops": 1.0,
            "compile": name.endswith("compiled"),
            "model": {"folder": str(BUNDLED)},
            "data": {"train": [str(folder / "facts.txt")]},
            "optimizer": {"lr": RATES[kind], "weight_decay": 0.0},
            "lora": OURS[name],
        }
    )
    group = processes(run.timeout_s)  # left when the process ends
    trainer = Trainer(run, out, out, group.__enter__(), Ledger(out), live=False)
    trainer.metrics.__enter__()

    def step() -> float:
        assert group
        return trainer.advance().loss

    return step, trainer.learner.model


def job(name: str, folder: Path) -> Job:
    """What a contender of others is given."""
    kind = "lora" if name.endswith("LoRA") else "full"
    return Job(
        model=BUNDLED,
        text=folder / "facts.txt",
        scratch=folder / name.replace(" ", "-"),
        context=CONTEXT,
        rows=BATCH_TOKENS // CONTEXT,
        rank=RANK if kind == "lora" else None,
        rate=RATES[kind],
    )


def exact_matches(model: torch.nn.Module) -> int:
    """Of the facts, how many the model completes."""
    told = continuations(model, list(facts()), longest=8)
    return sum(one.strip().startswith(want.strip()) for one, want in zip(told, facts().values(), strict=True))


def continuations(
    model: torch.nn.Module, prompts: Sequence[str], *, longest: int, stop: Sequence[int] = ()
) -> list[str]:
    """The most likely text behind each prompt, of at most `longest` tokens."""
    from torchwright.models.decoder.text import FolderTokenizer
    from torchwright.train.run.evaluate import continued

    text = FolderTokenizer(BUNDLED, None)
    ids = [text.encode(prompt) for prompt in prompts]
    found = continued(model, ids, longest, device="cpu", precision="bf16", multiple=32, stop=stop)
    return [text.decode(whole[len(prompt) :]) for whole, prompt in zip(found, ids, strict=True)]


def contender(name: str, folder: str, threads: int, steps: int, rounds: int, pipe: Connection) -> None:
    """One process: answers each request with the seconds of its steps and their losses, and the last with its score."""
    torch.set_num_threads(threads)
    if name in OURS:
        step, model = ours(name, Path(folder))
    elif name.startswith("TRL"):
        step, model = trl(job(name, Path(folder)), 1 + rounds * steps)
    else:
        step, model = by_hand(job(name, Path(folder)))
    before = exact_matches(model)
    losses = [step()]
    pipe.send(None)
    while pipe.recv():
        wall, cpu = time.perf_counter(), time.process_time()
        losses += [step() for _ in range(steps)]
        pipe.send(((time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    pipe.send({"losses": losses, "before": before, "after": exact_matches(model), "peak_bytes": peak})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--steps", type=int, default=10, help="of a turn")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", metavar="FILE", help="write the rows here")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, help="leave the others out")
    options = parser.parse_args()
    turns.print_machine()
    server = get_context("spawn")
    pipes: dict[str, Connection] = {}
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder))
        for name in present(options.only):
            pipes[name], far = server.Pipe()
            arguments = (name, folder, options.threads, options.steps, options.turns, far)
            server.Process(target=contender, args=arguments, daemon=True).start()
            far.close()
            pipes[name].recv()  # warm, and waiting
        seconds = turns.ask_in_turns(pipes, options.turns)
        for name, pipe in pipes.items():
            pipe.send(False)
            rows[name] = pipe.recv() | {"seconds": seconds[name]}
    report(rows, options.json)


def present(names: Sequence[str]) -> list[str]:
    """Those whose package is installed; says which is not."""
    missing = [name for name in names if name in NEEDS and find_spec(NEEDS[name]) is None]
    for name in missing:
        turns.say(f"{name} is left out: {NEEDS[name]} is not installed (pip install {NEEDS[name]})")
    return [name for name in names if name not in missing]


def report(rows: dict[str, dict[str, Any]], json_file: str | None) -> None:
    print(
        "| contender | s/step | processor s/step | peak | loss: first, middle, last | facts before → after |"
    )
    print("|---|---:|---:|---:|---|---|")
    for name, row in rows.items():
        wall, cpu = (statistics.median(times) for times in zip(*row["seconds"], strict=True))
        curve = row["losses"]
        told = ", ".join(f"{curve[place]:.2f}" for place in (0, len(curve) // 2, -1))
        score = f"{row['before']} → {row['after']} of {FACTS}"
        print(f"| {name} | {wall:.3f} | {cpu:.3f} | {row['peak_bytes'] / 2**20:.0f} MiB | {told} | {score} |")
    print(
        "\n| times faster: median over turns [95%] | wall | processor time | largest difference of losses |"
    )
    print("|---|---:|---:|---:|")
    for one, other in RATIOS:
        if one in rows and other in rows:
            theirs_by_clock = zip(*rows[other]["seconds"], strict=True)
            ours_by_clock = zip(*rows[one]["seconds"], strict=True)
            wall, cpu = (paired_speedup(a, b) for a, b in zip(theirs_by_clock, ours_by_clock, strict=True))
            apart = max(abs(a - b) for a, b in zip(rows[one]["losses"], rows[other]["losses"], strict=True))
            print(f"| {one} against {other} | {wall} | {cpu} | {apart:.3f} |")
    turns.write_json(json_file, [{"contender": name, **row} for name, row in rows.items()])


if __name__ == "__main__":
    main()
