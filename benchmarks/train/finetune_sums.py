"""The gain of fine-tuning: held-out sums of three digits that the bundled model gets right, before and after.

    python -m benchmarks.train.finetune_sums [--steps N] [--threads T] [--only full lora qlora] [--json FILE]

Questions and answers are conversations. `torchwright train` learns the answers of 800 of the thousand sums, with all
weights, with adapters, and with adapters over weights in four bits. The other 200 are asked for: the most likely answer
has to be the right number and to end there. Intervals are Clopper and Pearson's, 95%.
"""

from __future__ import annotations

import itertools
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import run
from benchmarks.harness.run import BUNDLED
from benchmarks.train.finetune import continuations
from torchwright.core.intervals import share_bounds
from torchwright.hub.chat_template import ChatTemplate
from torchwright.models.decoder import read_decoder_config
from torchwright.train.model import Transformer, load_weights
from torchwright.train.run.config.read import parse_run
from torchwright.train.run.loop.train import train_run

HELD_OUT, CONTEXT, BATCH_TOKENS, LONGEST = 200, 64, 1024, 4
METHODS: dict[str, tuple[float, dict[str, Any] | None]] = {
    "full": (1e-3, None),
    "lora": (5e-3, {"merge": True}),
    "qlora": (5e-3, {"base": "nf4", "merge": True}),
}
"""Method → its learning rate, and the run file's [lora]."""
Sum = tuple[int, ...]


def sums() -> tuple[list[Sum], list[Sum]]:
    """Return the sums to train on, and those held out."""
    every: list[Sum] = list(itertools.product(range(10), repeat=3))
    random.Random(0).shuffle(every)
    return every[HELD_OUT:], every[:HELD_OUT]


def asked(added: Sum) -> dict[str, str]:
    return {"role": "user", "content": f"What is {' + '.join(map(str, added))}?"}


def write_chat(file: Path, examples: list[Sum]) -> None:
    rows = [[asked(added), {"role": "assistant", "content": str(sum(added))}] for added in examples]
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))


def right(folder: Path, questions: list[Sum]) -> int:
    """Return the number of questions that a model answers exactly."""
    config, chat = read_decoder_config(folder), ChatTemplate(BUNDLED)
    model = Transformer(config)
    load_weights(model, folder)
    prompts = [chat.render([asked(added)]) for added in questions]
    found = continuations(model, prompts, longest=LONGEST, stop=config.eos)
    return sum(answer.strip() == str(sum(added)) for answer, added in zip(found, questions, strict=True))


def tuned(method: str, folder: Path, steps: int) -> Path:
    """Train, and return the folder of the model."""
    rate, lora = METHODS[method]
    parsed = parse_run(
        {
            "out": method,
            "tokens": steps * BATCH_TOKENS,
            "batch_tokens": BATCH_TOKENS,
            "context": CONTEXT,
            "peak_tflops": 1.0,
            "model": {"folder": str(BUNDLED)},
            "data": {"train": ["sums.jsonl"]},
            "optimizer": {"lr": rate},
            "schedule": {"warmup_tokens": 10 * BATCH_TOKENS},
            **({"lora": lora} if lora else {}),
        }
    )
    model = train_run(parsed, folder, live=False).model
    assert model is not None
    return model


def main() -> None:
    options = run.options(__doc__, steps=60, threads=2, only=tuple(METHODS))
    torch.set_num_threads(options.threads)
    rows = run.Rows(options.json, (f"{options.steps} steps", "held-out sums right [95%]", "processor time"))
    learnt, held_out = sums()

    def add(method: str, model: Path, spent: float) -> None:
        count = right(model, held_out)
        low, high = share_bounds(count, HELD_OUT)
        share = f"{count / HELD_OUT:.1%} [{low:.1%}, {high:.1%}]"
        rows.add({"way": method, "right": count, "processor_s": spent}, (method, share, f"{spent:.0f} s"))

    add("before", BUNDLED, 0.0)
    with tempfile.TemporaryDirectory() as temporary:
        write_chat(Path(temporary) / "sums.jsonl", learnt)
        for method in options.only:
            begun = time.process_time()
            model = tuned(method, Path(temporary), options.steps)
            add(method, model, time.process_time() - begun)


if __name__ == "__main__":
    main()
