"""Fine-tuning the bundled model to facts that it cannot know: this trainer against transformers, peft and TRL.

    pip install peft trl
    python -m benchmarks.train.finetune [--turns N] [--steps S] [--threads T] [--only NAME …] [--json FILE]

Each contender is a process of its own with the same windows in the same order, fused AdamW and bf16 autocast. Adapters
have r = 16 on all linear layers over weights in bfloat16. They make some steps in turn; ratios are medians over the
turns with 95% intervals. Before and after, each is asked for every fact and has to give it exactly. A contender whose
package is not installed is left out with a notice. transformers and peft run in a loop by hand, TRL in its
`SFTTrainer`.
"""

from __future__ import annotations

import random
import resource
import statistics
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import run
from benchmarks.harness.run import BUNDLED, Row
from benchmarks.harness.turns import ask, both_clocks, in_turns, processes, since
from benchmarks.train.finetune_peers import Job, by_hand, trl
from torchwright.hardware.measure.clock import paired_speedup

CONTEXT, BATCH_TOKENS, FACTS = 128, 1024, 24
RANK = 16
RATES = {"full": 1e-3, "lora": 5e-3}
# fmt: off
WORDS = ["socket", "json", "thread", "path", "queue", "regex", "codec", "tuple", "frame", "token", "slice", "class"]
# fmt: on
FACTS_OF = [f"{one} {other}" for one, other in zip(WORDS, WORDS[1:] + WORDS[:1], strict=True)] + WORDS
OURS: dict[str, dict[str, Any] | None] = {
    "torchwright full": None,
    "torchwright LoRA": {"r": RANK},
    "torchwright LoRA, compiled": {"r": RANK},
    "torchwright QLoRA (nf4)": {"r": RANK, "base": "nf4"},
}
NEEDS = {"transformers full": "transformers", "peft LoRA": "peft", "TRL full": "trl", "TRL LoRA": "trl"}
"""Third-party contender → its package."""
NAMES = (*OURS, *NEEDS)
RATIOS = tuple(
    (ours, theirs)
    for ours in OURS
    for theirs in (("transformers full", "TRL full") if OURS[ours] is None else ("peft LoRA", "TRL LoRA"))
)


def facts() -> dict[str, str]:
    """Return question → answer: numbers that nobody could guess."""
    draw = random.Random(0)
    return {f"The code of the {name} is": f" {draw.randrange(1000, 10000)}." for name in FACTS_OF[:FACTS]}


def write_data(folder: Path) -> None:
    """Write every fact a hundred times, in another order each time."""
    draw, lines = random.Random(1), []
    for _ in range(100):
        order = list(facts().items())
        draw.shuffle(order)
        lines += [question + answer for question, answer in order]
    (folder / "facts.txt").write_text("\n".join(lines))


def ours(name: str, folder: Path) -> tuple[Callable[[], float], torch.nn.Module]:
    """Return a step of `torchwright train`, and the model."""
    from torchwright.train.ledger import Ledger
    from torchwright.train.run.config.read import parse_run
    from torchwright.train.run.loop.trainer import Trainer
    from torchwright.train.run.runtime.processes import processes as run_processes

    out = folder / name.replace(" ", "-")
    out.mkdir()
    kind = "full" if OURS[name] is None else "lora"
    parsed = parse_run(
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
    group = run_processes(parsed.timeout_s)  # left when the process ends
    trainer = Trainer(parsed, out, out, group.__enter__(), Ledger(out), live=False)
    trainer.metrics.__enter__()

    def step() -> float:
        assert group
        return trainer.advance().loss

    return step, trainer.learner.model


def job(name: str, folder: Path) -> Job:
    """Return the job of a third-party contender."""
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
    """Return the number of facts that the model completes."""
    found = continuations(model, list(facts()), longest=8)
    return sum(
        one.strip().startswith(want.strip()) for one, want in zip(found, facts().values(), strict=True)
    )


def continuations(
    model: torch.nn.Module, prompts: Sequence[str], *, longest: int, stop: Sequence[int] = ()
) -> list[str]:
    """Return the most likely text after each prompt, of at most `longest` tokens."""
    from torchwright.models.decoder.generation.text import FolderTokenizer
    from torchwright.train.run.loop.evaluate import continued

    text = FolderTokenizer(BUNDLED, None)
    ids = [text.encode(prompt) for prompt in prompts]
    found = continued(model, ids, longest, device="cpu", precision="bf16", multiple=32, stop=stop)
    return [text.decode(whole[len(prompt) :]) for whole, prompt in zip(found, ids, strict=True)]


def contender(name: str, folder: str, threads: int, steps: int, rounds: int, pipe: Connection) -> None:
    """Answer each request with the seconds of a step, and the last with losses and scores, in a process of its own."""
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
        begun = both_clocks()
        losses += [step() for _ in range(steps)]
        pipe.send([seconds / steps for seconds in since(begun)])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    pipe.send({"losses": losses, "before": before, "after": exact_matches(model), "peak_bytes": peak})


def main() -> None:
    options = run.options(__doc__, turns=12, steps=10, threads=2, only=NAMES)
    rows = run.Rows(options.json)
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder))
        arguments = (folder, options.threads, options.steps, options.turns)
        with processes(contender, present(options.only), *arguments) as pipes:
            found = in_turns({name: partial(ask, pipe) for name, pipe in pipes.items()}, options.turns)
            ends = {name: ask(pipe, False) | {"seconds": found[name]} for name, pipe in pipes.items()}
    report(ends, rows)


def present(names: Sequence[str]) -> list[str]:
    """Return the names whose package is installed; print the others."""
    missing = [name for name in names if name in NEEDS and find_spec(NEEDS[name]) is None]
    for name in missing:
        run.say(f"{name} is left out: {NEEDS[name]} is not installed (pip install {NEEDS[name]})")
    return [name for name in names if name not in missing]


def report(found: dict[str, Row], rows: run.Rows) -> None:
    columns = ("s/step", "processor s/step", "peak", "loss: first, middle, last", "facts before → after")
    run.head(("contender", *columns))
    for name, row in found.items():
        wall, cpu = (statistics.median(times) for times in zip(*row["seconds"], strict=True))
        losses = row["losses"]
        curve = ", ".join(f"{losses[place]:.2f}" for place in (0, len(losses) // 2, -1))
        score = f"{row['before']} → {row['after']} of {FACTS}"
        cells = (name, f"{wall:.3f}", f"{cpu:.3f}", f"{row['peak_bytes'] / 2**20:.0f} MiB", curve, score)
        rows.add({"contender": name, **row}, cells)
    print()
    title = "times faster: median over turns [95%]"
    run.head((title, "wall", "processor time", "largest difference of losses"))
    for one, other in RATIOS:
        if one in found and other in found:
            clocks = (zip(*found[name]["seconds"], strict=True) for name in (other, one))
            gains = (paired_speedup(theirs, ours) for theirs, ours in zip(*clocks, strict=True))
            losses = zip(found[one]["losses"], found[other]["losses"], strict=True)
            apart = max(abs(a - b) for a, b in losses)
            print(run.line((f"{one} against {other}", *gains, f"{apart:.3f}")))


if __name__ == "__main__":
    main()
