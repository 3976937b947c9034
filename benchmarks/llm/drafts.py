"""Served tokens per second of a target with no drafts, n-gram look-up, a trained EAGLE-3 head, and both.

    python -m benchmarks.llm.drafts [--model DIR] [--characters 1000000] [--tokens 300000] [--rounds 6]
        [--steps 3] [--vocabulary 1024 | --start HEAD] [--folder DIR] [--batches 1 4 16] [--quantize-draft w8a8]

The target is the bundled model in bfloat16 without --model. The head is trained by `torchwright train --draft eagle3`
on `--characters` of the standard library's modules: of each 256 tokens the target writes the last 192 anew. It proposes
`--vocabulary` tokens and is trained on `--steps` proposals in a row, or goes on from the head in `--start`. Prompts are
pieces of the bundled held-out text, which neither has seen. The contenders take turns in one process, and each round's
requests are the same for all. Printed are the median tokens per second and the accepted proposals for each other token.
Ratios to no drafts and to n-gram are taken within rounds, with 95% intervals. With --quantize-draft the head's layers
are packed so, and the target stays in bfloat16: proposals change, and no answer.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from benchmarks.harness import run
from benchmarks.llm.modules import write_rows
from torchwright.hardware.measure.clock import paired_speedup
from torchwright.models.decoder import load_decoder
from torchwright.models.decoder.draft import load_draft
from torchwright.optimization.decode_bench import Sizes
from torchwright.serve.engine.draft_bench import (
    LOOKED_UP,
    PLAIN,
    Served,
    contenders,
    cut,
    in_rounds,
)

PROMPT, NEW = 64, 128
"""Tokens of a prompt and of its answer."""
WINDOW, BATCH = 256, 2048
"""Tokens of a training window, and of a step."""


def main() -> int:
    options = run.options(
        __doc__,
        model=str,
        characters=1_000_000,
        tokens=300_000,
        steps=3,
        vocabulary=1024,
        start=str,
        rounds=6,
        folder=str,
        batches=[1, 4, 16],
        temperatures=[0.0, 0.8],
        quantize_draft=str,
    )
    target = Path(options.model or run.BUNDLED)
    rows = run.Rows(
        options.json,
        ("batch", "temperature", "contender", "tok/s", "over no drafts", "over n-gram", "accepted a step"),
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.folder or scratch)
        head = trained(target, folder, options)
        report = json.loads((head / "acceptance.json").read_text())
        run.say(json.dumps(report))
        rows.add({"training": report})
        serve(target, head, options, rows)
    return 0


def trained(target: Path, folder: Path, options: Any) -> Path:
    """The head of the target, trained in `folder` unless it is there."""
    head = folder / "run" / "model"
    if not head.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        text = folder / "text.jsonl"
        write_rows(text, [sysconfig.get_path("stdlib")], options.characters)
        words = ["--model", target, "--data", text, "-o", folder / "run", "--draft", "eagle3"]
        answers = ["--regenerate", f"temperature=0.8,tokens={WINDOW - PROMPT},prompt_tokens={PROMPT}"]
        fields = {
            "context": WINDOW,
            "batch_tokens": BATCH,
            "micro_batches": 2,
            "tokens": options.tokens // BATCH * BATCH,
            "head.steps": options.steps,
            "optimizer.lr": 1e-3,
        }
        fields |= {"head.start": options.start} if options.start else {"head.vocabulary": options.vocabulary}
        sizes = [word for name, value in fields.items() for word in ("--set", f"{name}={value}")]
        begun = perf_counter()
        found = run.torchwright("train", *words, *answers, *sizes, "--quiet")
        run.say(f"{found.stdout}{perf_counter() - begun:.0f} s")
    return head


def serve(target: Path, head: Path, options: Any, rows: run.Rows) -> None:
    loaded = load_decoder(target, torch.bfloat16)
    prompts = cut(loaded.encode((run.BUNDLED / "eval.txt").read_text("utf-8")), PROMPT)
    draft = load_draft(head, loaded, options.quantize_draft)
    for batch in options.batches:
        sizes = Sizes(batch=batch, prompt_tokens=PROMPT, new_tokens=NEW)
        engines = contenders(loaded, draft, sizes)
        for temperature in options.temperatures:
            told(in_rounds(engines, prompts, sizes, temperature, options.rounds), batch, temperature, rows)


def told(found: dict[str, list[Served]], batch: int, temperature: float, rows: run.Rows) -> None:
    seconds = {name: [one.seconds for one in served] for name, served in found.items()}
    for name, served in found.items():
        over = {base: run.times(paired_speedup(seconds[base], seconds[name])) for base in (PLAIN, LOOKED_UP)}
        speed = median(one.tokens / one.seconds for one in served)
        accepted = median(one.accepted / max(1, one.tokens - one.accepted) for one in served)
        row = {"batch": batch, "temperature": temperature, "contender": name, "tokens_per_s": speed}
        row |= {"accepted": accepted, "over": over, "seconds": seconds[name], "load": os.getloadavg()[0]}
        rows.add(
            row, (batch, temperature, name, f"{speed:.0f}", over[PLAIN], over[LOOKED_UP], f"{accepted:.2f}")
        )


if __name__ == "__main__":
    sys.exit(main())
