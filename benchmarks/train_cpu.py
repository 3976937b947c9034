"""Training speed on the bundled model's shape: this trainer, transformers' Trainer, and a loop written by hand.

    pip install -e '.[bench]'
    python benchmarks/train_cpu.py [--turns N] [--seconds S] [--threads T] [--json FILE]

Each contender is a process of its own with the same windows in the same order, bf16 autocast, fused AdamW and two
threads; they work in turn for a few seconds each, and ratios are medians over the turns. The loop by hand runs the
same modules as the trainer, so that it tells what the trainer itself costs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import turns

BUNDLED = Path(__file__).parents[1] / "src" / "torchwright" / "workloads" / "bundled"
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
    """A run of the bundled model from random weights on its own texts; `changes` replace whole fields."""
    texts = [str(BUNDLED / name) for name in ("eval.txt", "calibration.txt")]
    run = {
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
    path.write_text(to_toml(run | changes))
    return path


def to_toml(data: dict[str, Any], prefix: str = "") -> str:
    """Plain data as TOML: values first, then a table for each dictionary."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in data.items() if not isinstance(value, dict)]
    for key, value in data.items():
        if isinstance(value, dict):
            lines += [f"[{prefix}{key}]", to_toml(value, f"{prefix}{key}.")]
    return "\n".join(lines)


def torchwright(folder: Path, name: str) -> Callable[[], float]:
    """One step of `torchwright train` in the way that the contender's name says."""
    from torch._dynamo import compiled_autograd

    from torchwright.train.ledger import Ledger
    from torchwright.train.run.deterministic import deterministic
    from torchwright.train.run.processes import processes
    from torchwright.train.run.read import read_run
    from torchwright.train.run.trainer import Trainer

    out = folder / name.replace(", ", "-").replace(" ", "-")
    out.mkdir()
    how = {"compile": "compiled" in name, "deterministic": "deterministic" in name}
    run = read_run(run_file(out, threads=torch.get_num_threads(), **how))
    group = processes(run.timeout_s)  # left when the process ends
    bits = deterministic(run, "cpu")
    bits.__enter__()
    whole_backward = "autograd" in name
    trainer = Trainer(run, out, out, group.__enter__(), Ledger(out), live=False)
    trainer.metrics.__enter__()

    def step() -> float:
        assert group
        assert bits
        with compiled_autograd._enable(torch.compile) if whole_backward else nullcontext():
            return trainer.advance().loss

    return step


def windows(folder: Path) -> Any:
    """The same walk over the same tokens."""
    from torchwright.train.data.shards import Shards
    from torchwright.train.data.streams import Windows
    from torchwright.train.data.text import token_shards

    texts = [BUNDLED / "eval.txt", BUNDLED / "calibration.txt"]
    return Windows(Shards(token_shards(texts, ["*.txt"], BUNDLED, 1, folder / "tokens"), 4096), CONTEXT, 0)


def by_hand(folder: Path) -> Callable[[], float]:
    """What one writes on an afternoon."""
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
    """transformers' Trainer, which keeps the loop to itself: a callback waits for each turn."""
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

        started, steps = (0.0, 0.0), 0

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            self.steps += 1
            if self.started[0] == 0:  # the first step warms up
                pipe.send(None)
            elif time.perf_counter() - self.started[0] < seconds:
                return control
            else:
                pipe.send(rates_since(self.started, self.steps))
            if not pipe.recv():
                control.should_training_stop = True
            self.started, self.steps = clocks(), 0
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
    """One process: warms up, then works for `seconds` each time it is asked, and answers with its tokens per second."""
    torch.set_num_threads(threads)
    if name == "transformers Trainer":
        trainer_steps(Path(folder), pipe, seconds)
        return
    if name == "loop by hand":
        step = by_hand(Path(folder))
    else:
        step = torchwright(Path(folder), name)
    for _ in range(2):
        step()
    pipe.send(None)
    while pipe.recv():
        started, done = clocks(), 0
        while time.perf_counter() - started[0] < seconds:
            step()
            done += 1
        pipe.send(rates_since(started, done))


def clocks() -> tuple[float, float]:
    """Seconds of the wall clock and of this process's processors."""
    return time.perf_counter(), time.process_time()


def rates_since(started: tuple[float, float], steps: int) -> tuple[float, float]:
    """Tokens per second of each clock."""
    wall, cpu = (now - then for now, then in zip(clocks(), started, strict=True))
    return steps * BATCH_TOKENS / wall, steps * BATCH_TOKENS / cpu


NAMES = (
    "torchwright",
    "torchwright, compiled",
    "torchwright, deterministic",
    "torchwright, compiled autograd",
    "loop by hand",
    "transformers Trainer",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of one contender's turn")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", metavar="FILE", help="write the rows here")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, help="leave the others out")
    options = parser.parse_args()
    turns.print_machine()
    server = get_context("forkserver")  # imports once, before anybody has threads
    server.set_forkserver_preload(["transformers", "torchwright.train.run.trainer"])
    pipes: dict[str, Connection] = {}
    with tempfile.TemporaryDirectory() as folder:
        windows(Path(folder))  # tokenized once, before anybody reads
        processes = []
        for name in options.only:
            ours, theirs = server.Pipe()
            arguments = (name, folder, options.threads, options.seconds, theirs)
            process = server.Process(target=contender, args=arguments, daemon=True)
            process.start()
            theirs.close()
            pipes[name] = ours
            processes.append(process)
            ours.recv()  # warm, and waiting
        rates = turns.ask_in_turns(pipes, options.turns)
        for pipe in pipes.values():
            pipe.send(False)
        for process in processes:
            process.join(30)
    report(rates, options.json)


def report(rates: dict[str, list[tuple[float, float]]], json_file: str | None) -> None:
    print("| contender | tokens/s, median | per processor second | turns |\n|---|---:|---:|---|")
    rows: list[dict[str, Any]] = []
    for name, found in rates.items():
        wall, cpu = (statistics.median(rate) for rate in zip(*found, strict=True))
        print(f"| {name} | {wall:,.0f} | {cpu:,.0f} | {', '.join(f'{rate:,.0f}' for rate, _ in found)} |")
        rows.append({"contender": name, "tokens_per_s": found})
    print("\n| ratio, median over turns | found | by processor time | bar |\n|---|---:|---:|---:|")
    for label, (one, other, bar) in BARS.items():
        if one in rates and other in rates:
            wall, cpu = turns.median_ratios(rates[one], rates[other])
            print(f"| {label} | {wall:.2f} | {cpu:.2f} | {bar} |")
            rows.append({"ratio": label, "wall": wall, "processor": cpu, "bar": bar})
    turns.write_json(json_file, rows)


if __name__ == "__main__":
    main()
