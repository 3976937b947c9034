"""What fine-tuning is worth: held-out sums of three digits that the bundled model gets right, before and after.

    python benchmarks/finetune_sums.py [--steps N] [--threads T] [--only full lora qlora] [--json FILE]

Questions and answers are conversations; `torchwright train` learns the answers of 800 of the thousand sums, with all
weights, with adapters, and with adapters over weights in four bits, and the other 200 are asked for: the most likely
answer has to be the right number and to end there. Intervals are Clopper and Pearson's, 95%.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import turns
from finetune import BUNDLED, continuations
from torchwright.core.intervals import share_bounds
from torchwright.hub.chat_template import ChatTemplate
from torchwright.models.decoder import read_decoder_config
from torchwright.train.model import Transformer, load_weights
from torchwright.train.run.loop import train_run
from torchwright.train.run.read import parse_run

HELD_OUT, CONTEXT, BATCH_TOKENS, LONGEST = 200, 64, 1024, 4
WAYS: dict[str, tuple[float, dict[str, Any] | None]] = {
    "full": (1e-3, None),
    "lora": (5e-3, {"merge": True}),
    "qlora": (5e-3, {"base": "nf4", "merge": True}),
}
"""Way → its rate, and the run file's [lora]."""
Sum = tuple[int, ...]


def sums() -> tuple[list[Sum], list[Sum]]:
    """Those to train on, and those held out."""
    every: list[Sum] = list(itertools.product(range(10), repeat=3))
    random.Random(0).shuffle(every)
    return every[HELD_OUT:], every[:HELD_OUT]


def asked(added: Sum) -> dict[str, str]:
    return {"role": "user", "content": f"What is {' + '.join(map(str, added))}?"}


def write_chat(file: Path, examples: list[Sum]) -> None:
    rows = [[asked(added), {"role": "assistant", "content": str(sum(added))}] for added in examples]
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))


def right(folder: Path, questions: list[Sum]) -> int:
    """How many a model answers exactly."""
    config, chat = read_decoder_config(folder), ChatTemplate(BUNDLED)
    model = Transformer(config)
    load_weights(model, folder)
    prompts = [chat.render([asked(added)]) for added in questions]
    told = continuations(model, prompts, longest=LONGEST, stop=config.eos)
    return sum(answer.strip() == str(sum(added)) for answer, added in zip(told, questions, strict=True))


def tuned(way: str, folder: Path, steps: int) -> Path:
    """The folder of the model that the run leaves."""
    rate, lora = WAYS[way]
    run = parse_run(
        {
            "out": way,
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
    model = train_run(run, folder, live=False).model
    assert model is not None
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--json", metavar="FILE", help="write the rows here")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    turns.print_machine()
    learnt, held_out = sums()
    rows = [{"way": "before", "right": right(BUNDLED, held_out), "processor_s": 0.0}]
    with tempfile.TemporaryDirectory() as temporary:
        write_chat(Path(temporary) / "sums.jsonl", learnt)
        for way in options.only:
            begun = time.process_time()
            model = tuned(way, Path(temporary), options.steps)
            spent = time.process_time() - begun
            rows.append({"way": way, "right": right(model, held_out), "processor_s": spent})
            turns.say(str(rows[-1]))
    print(f"| {options.steps} steps | held-out sums right [95%] | processor time |\n|---|---|---:|")
    for row in rows:
        low, high = share_bounds(row["right"], HELD_OUT)
        share = f"{row['right'] / HELD_OUT:.1%} [{low:.1%}, {high:.1%}]"
        print(f"| {row['way']} | {share} | {row['processor_s']:.0f} s |")
    turns.write_json(options.json, rows)


if __name__ == "__main__":
    main()
