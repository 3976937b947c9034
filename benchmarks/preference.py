"""DPO, IPO and the hinge loss on the bundled model: this trainer and TRL's DPOTrainer on the same pairs, step by step.

    pip install trl
    python benchmarks/preference.py [--pairs N] [--steps S]

Every step takes all pairs, so that no order of batches is between the two; float32, AdamW at one rate, clipping at 1.
Adapters are not compared: they begin at other random numbers. Prints the losses, reward margins and log-probabilities
of each step, and the largest difference of each.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import tempfile
from pathlib import Path
from typing import Any

import torch

from finetune import BUNDLED, WORDS
from torchwright.models.decoder.families import read_decoder_config
from torchwright.train.data.packing import Packed
from torchwright.train.run.corpus import open_data
from torchwright.train.run.loop import train_run
from torchwright.train.run.metrics import read_figures
from torchwright.train.run.processes import processes
from torchwright.train.run.read import parse_run
from torchwright.train.run.source import write_source

CONTEXT, RATE, BETA = 128, 1e-5, 0.1
BEGIN = "<|begin|>"
"""The bundled tokenizer puts it before what TRL gives it; rows are read here as they are written."""
LOSSES = {"dpo": "sigmoid", "ipo": "ipo", "hinge": "hinge"}
"""Ours → TRL's name."""
COMPARED = {
    "loss": "loss",
    "reward_margin": "rewards/margins",
    "logp_chosen": "logps/chosen",
    "logp_rejected": "logps/rejected",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    import trl  # pyright: ignore[reportMissingImports]

    print(f"torch {torch.__version__}, trl {trl.__version__}, {platform.processor() or platform.machine()}")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        pairs = made_pairs(options.pairs)
        for loss in LOSSES:
            folder = Path(temporary) / loss
            folder.mkdir()
            ours = trained_here(folder, pairs, loss, options.steps)
            theirs = trained_by_trl(folder, pairs, loss, options.steps)
            report(loss, ours, theirs)


def made_pairs(count: int) -> list[dict[str, str]]:
    rng = random.Random(0)
    rows = []
    for _ in range(count):
        one, other = rng.sample(WORDS, 2)
        rows.append(
            {
                "prompt": f"The {one} module",
                "chosen": f" uses the {other} module of the standard library.",
                "rejected": f" is {other}.",
            }
        )
    return rows


def trained_here(folder: Path, pairs: list[dict[str, str]], loss: str, steps: int) -> list[dict[str, float]]:
    begun = [{**row, "prompt": BEGIN + row["prompt"]} for row in pairs]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in begun))
    values: dict[str, Any] = {
        "out": "out",
        "context": CONTEXT,
        "tokens": CONTEXT,
        "batch_tokens": CONTEXT,
        "precision": "fp32",
        "log_every": 1,
        "peak_tflops": 1.0,
        "model": {"folder": str(BUNDLED)},
        "data": {"train": ["pairs.jsonl"]},
        "optimizer": {"lr": RATE, "weight_decay": 0.0, "betas": [0.9, 0.999]},
        "schedule": {"name": "wsd"},
        "preference": {"loss": loss, "beta": BETA},
    }
    batch = CONTEXT * windows(folder, values)
    # The rate falls in the last step alone, which is one more than is compared.
    run = parse_run(
        {
            **values,
            "batch_tokens": batch,
            "tokens": (steps + 1) * batch,
            "schedule": {"name": "wsd", "decay_fraction": 1e-6},
        }
    )
    train_run(run, folder, live=False)
    figures = read_figures(folder / "out")
    return [{name: figures[step][name] for name in COMPARED} for step in range(1, steps + 1)]


def windows(folder: Path, values: dict[str, Any]) -> int:
    """How many windows all pairs take."""
    run = parse_run(values)
    with tempfile.TemporaryDirectory() as beside, processes(60.0):
        source = write_source(run, folder, Path(beside))
        corpus = open_data(run, read_decoder_config(source), folder, source, Path(beside))
        return Packed(corpus.train["train"], CONTEXT, 0, end=None, pairs=True).count


def trained_by_trl(
    folder: Path, pairs: list[dict[str, str]], loss: str, steps: int
) -> list[dict[str, float]]:
    import trl  # pyright: ignore[reportMissingImports]
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trainer = trl.DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(BUNDLED),
        train_dataset=Dataset.from_list(pairs),
        args=trl.DPOConfig(
            output_dir=str(folder / "trl"),
            max_steps=steps,
            per_device_train_batch_size=len(pairs),
            learning_rate=RATE,
            lr_scheduler_type="constant",
            warmup_steps=0,
            weight_decay=0.0,
            max_grad_norm=1.0,
            beta=BETA,
            loss_type=[LOSSES[loss]],
            max_length=CONTEXT,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
        ),
    )
    trainer.train()
    lines = [line for line in trainer.state.log_history if "rewards/margins" in line]
    return [{ours: float(line[theirs]) for ours, theirs in COMPARED.items()} for line in lines]


def report(loss: str, ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> None:
    print(f"\n{loss}: ours | TRL")
    for step, (one, other) in enumerate(zip(ours, theirs, strict=True), 1):
        told = "  ".join(f"{name} {one[name]:.6f} | {other[name]:.6f}" for name in COMPARED)
        print(f"step {step}: {told}")
    for name in COMPARED:
        pairs = zip(ours, theirs, strict=True)
        print(
            f"largest difference of {name}: {max(abs(one[name] - other[name]) for one, other in pairs):.2e}"
        )


if __name__ == "__main__":
    main()
