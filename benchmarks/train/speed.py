"""Training speed on the bundled model's shape: this trainer, transformers' Trainer, and a loop written by hand.

    pip install -e '.[bench]'
    python -m benchmarks.train.speed [--turns N] [--seconds S] [--threads T] [--json FILE]

Each contender is a process of its own with the same windows in the same order, bf16 autocast, fused AdamW and two
threads; they work in turn for a few seconds each, and ratios are medians over the turns. The loop by hand runs the
same modules as the trainer, so that the difference is the cost of the trainer itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import run
from benchmarks.harness.run import BUNDLED, Row
from benchmarks.harness.turns import ask, both_clocks, in_turns, processes, ratios, since

CONTEXT, BATCH_TOKENS, MICRO_BATCHES = 512, 2048, 2
ROWS = BATCH_TOKENS // CONTEXT
ENOUGH = 10_000
"""More steps than any run here makes."""
BARS = {
    "torchwright / Trainer": ("torchwright", "transformers Trainer", 1.3),
    "torchwright / loop": ("torchwright", "loop by hand", 0.98),
    "torchwright compiled / loop": ("torchwright, compiled", "loop by hand", 1.0),
    "deterministic / torchwright": ("torchwright, deterministic", "torchwright", 0.95),
    "compiled autograd / compiled": ("torchwright, compiled autograd", "torchwright, compiled", 1.0),
}


def run_file(folder: Path, **changes: Any) -> Path:
    """Write a run of the bundled model from random weights on its own texts; `changes` replace whole fields."""
    texts = [str(BUNDLED / name) for name in ("eval.txt", "calibration.txt")]
    values = {
        "out": "out",
        "tokens": ENOUGH * BATCH_TOKENS,
        "batch_tokens": BATCH_TOKENS,
        "context": CONTEXT,
        "micro_batches": MICRO_BATCHES,
        "peak_tflops": 1.0,
        "model": {"tokenizer": str(BUNDLED), "config": json.loads((BUNDLED / "config.json").read_text())},
        "data": {"train": texts},
    }
    path = folder / "run.toml"
    path.write_text(to_toml(values | changes))
    return path


def to_toml(data: dict[str, Any], prefix: str = "") -> str:
    """Return plain data as TOML: values first, then a table for each dictionary."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in data.items() if not isinstance(value, dict)]
    for key, value in data.items():
        if isinstance(value, dict):
            lines += [f"[{prefix}{key}]", to_toml(value, f"{prefix}{key}.")]
    return "\n".join(lines)


def torchwright(folder: Path, name: str) -> Callable[[], float]:
    """Return one step of `torchwright train` with the settings in the contender's name."""
    from torch._dynamo import compiled_autograd

    from torchwright.train.ledger import Ledger
    from torchwright.train.run.config.read import read_run
    from torchwright.train.run.loop.trainer import Trainer
    from torchwright.train.run.runtime.deterministic import deterministic
    from torchwright.train.run.runtime.processes import processes as run_processes

    out = folder / name.replace(", ", "-").replace(" ", "-")
    out.mkdir()
    how = {"compile": "compiled" in name, "deterministic": "deterministic" in name}
    read = read_run(run_file(out, threads=torch.get_num_threads(), **how))
    group = run_processes(read.timeout_s)  # left when the process ends
    bits = deterministic(read, "cpu")
    bits.__enter__()
    whole_backward = "autograd" in name
    trainer = Trainer(read, out, out, group.__enter__(), Ledger(out), live=False)
    trainer.metrics.__enter__()

    def step() -> float:
        assert group
        assert bits
        with compiled_autograd._enable(torch.compile) if whole_backward else nullcontext():
            return trainer.advance().loss

    return step


def windows(folder: Path) -> Any:
    """Return the walk over the tokens that all contenders share."""
    from torchwright.train.data.shards import Shards
    from torchwright.train.data.streams import Windows
    from torchwright.train.data.text import token_shards

    texts = [BUNDLED / "eval.txt", BUNDLED / "calibration.txt"]
    return Windows(Shards(token_shards(texts, ["*.txt"], BUNDLED, 1, folder / "tokens"), 4096), CONTEXT, 0)


def by_hand(folder: Path) -> Callable[[], float]:
    """Return one step of a plain loop."""
    from torchwright.models.decoder import read_decoder_config
    from torchwright.train.model import Transformer, explicit_attention

    data = windows(folder)
    model = Transformer(read_decoder_config(BUNDLED))
    model.use_attention(explicit_attention)
    model.reset_parameters(0)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    done = 0

    def step() -> float:
        nonlocal done
        total = 0.0
        for micro in range(MICRO_BATCHES):
            rows = ROWS // MICRO_BATCHES
            batch = data.batch(done * ROWS + micro * rows, rows)
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(batch.ids_BT)
                loss = torch.nn.functional.cross_entropy(
                    logits.float().flatten(0, 1), batch.labels_BT.flatten()
                )
            (loss / MICRO_BATCHES).backward()
            total += loss.item() / MICRO_BATCHES
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        return total

    return step


def trainer_steps(folder: Path, pipe: Connection, seconds: float) -> None:
    """Run transformers' Trainer, which owns the loop: a callback waits for each turn."""
    import transformers
    from torch.utils.data import Dataset

    data = windows(folder)

    class Rows(Dataset):
        def __len__(self) -> int:
            return ENOUGH * ROWS

        def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
            ids = data.batch(number, 1).ids_BT[0]  # the model shifts labels by itself
            return {"input_ids": ids, "labels": ids}

    class Turns(transformers.TrainerCallback):
        """Answers a request after as many steps as fill the turn."""

        begun, steps = (0.0, 0.0), 0

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            self.steps += 1
            if self.begun[0] == 0:  # the first step warms up
                pipe.send(None)
            elif time.perf_counter() - self.begun[0] < seconds:
                return control
            else:
                pipe.send(rates_since(self.begun, self.steps))
            if not pipe.recv():
                control.should_training_stop = True
            self.begun, self.steps = both_clocks(), 0
            return control

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)  # type: ignore[arg-type]

    torch.manual_seed(0)
    config = transformers.LlamaConfig.from_pretrained(BUNDLED)
    model = transformers.LlamaForCausalLM(config).float()
    settings = transformers.TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=ROWS // MICRO_BATCHES,
        gradient_accumulation_steps=MICRO_BATCHES,
        max_steps=ENOUGH,
        learning_rate=3e-4,
        adam_beta2=0.95,
        weight_decay=0.1,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        lr_scheduler_type="constant",
        bf16=True,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    InOrder(model=model, args=settings, train_dataset=Rows(), callbacks=[Turns()]).train()


def contender(name: str, folder: str, threads: int, seconds: float, pipe: Connection) -> None:
    """Warm up, then work for `seconds` each time that True arrives, and answer with tokens per second."""
    torch.set_num_threads(threads)
    if name == "transformers Trainer":
        trainer_steps(Path(folder), pipe, seconds)
        return
    step = by_hand(Path(folder)) if name == "loop by hand" else torchwright(Path(folder), name)
    for _ in range(2):
        step()
    pipe.send(None)
    while pipe.recv():
        begun, done = both_clocks(), 0
        while time.perf_counter() - begun[0] < seconds:
            step()
            done += 1
        pipe.send(rates_since(begun, done))


def rates_since(begun: tuple[float, float], steps: int) -> tuple[float, float]:
    """Return the tokens per second of the wall clock and of processor time."""
    wall, cpu = since(begun)
    return steps * BATCH_TOKENS / wall, steps * BATCH_TOKENS / cpu


def rates(names: Sequence[str], options: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """Return every contender's tokens per second, in turns; `options` has threads, seconds and turns."""
    preload = (
        "transformers",
        "torchwright.train.run.loop.trainer",
    )  # imported once, before anybody has threads
    with tempfile.TemporaryDirectory() as folder:
        windows(Path(folder))  # tokenized once, before anybody reads
        arguments = (folder, options.threads, options.seconds)
        with processes(contender, names, *arguments, preload=preload) as pipes:
            found = in_turns({name: partial(ask, pipe) for name, pipe in pipes.items()}, options.turns)
            for pipe in pipes.values():
                pipe.send(False)
    return found


NAMES = (
    "torchwright",
    "torchwright, compiled",
    "torchwright, deterministic",
    "torchwright, compiled autograd",
    "loop by hand",
    "transformers Trainer",
)


def main() -> None:
    options = run.options(__doc__, turns=5, seconds=4.0, threads=2, only=NAMES)
    rows = run.Rows(options.json)
    found = rates(options.only, options)
    run.head(("contender", "tokens/s, median", "per processor second", "turns"))
    for name, turns in found.items():
        wall, cpu = (statistics.median(rate) for rate in zip(*turns, strict=True))
        cells = (name, f"{wall:,.0f}", f"{cpu:,.0f}", ", ".join(f"{rate:,.0f}" for rate, _ in turns))
        rows.add({"contender": name, "tokens_per_s": turns}, cells)
    print()
    run.head(("ratio, median over turns", "found", "by processor time", "bar"))
    for label, (one, other, bar) in BARS.items():
        if one in found and other in found:
            wall, cpu = ratios(found[one], found[other])
            row: Row = {"ratio": label, "wall": wall, "processor": cpu, "bar": bar}
            rows.add(row, (label, f"{wall:.2f}", f"{cpu:.2f}", bar))


if __name__ == "__main__":
    main()
