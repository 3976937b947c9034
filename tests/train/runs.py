"""Small runs for the trainer's tests: a run file, its data, and what a finished run left."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faulty
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from preloaded import forking
from torchwright.train.run.objectives import learner
from torchwright.train.run.observe.metrics import read_figures
from torchwright.train.run.runtime.checkpoint import FOLDER, DigestWriter, whole

BUNDLED = Path(__file__).parents[2] / "src" / "torchwright" / "workloads" / "bundled"
VOCABULARY = 128
LIMIT = 240.0
"""Seconds for the processes of a run, on a busy machine."""
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
MIXTURE: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
"""What makes a mixture of experts of it."""


def make_run(folder: Path, **changes: Any) -> Path:
    """A run file in `folder` with two shards of learnable tokens; `changes` replace whole fields."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for name, size in (("a.npy", 3000), ("b.npy", 2000), ("held.npy", 700)):
        # Each token depends on the one before, so that there is something to learn.
        steps = rng.integers(1, 4, size)
        np.save(folder / name, (2 + np.cumsum(steps) % (VOCABULARY - 2)).astype(np.uint16))
    run: dict[str, Any] = {
        "out": "out",
        "tokens": 6 * 256,
        "batch_tokens": 256,
        "context": 32,
        "micro_batches": 2,
        "precision": "fp32",
        "log_every": 1,
        "peak_tflops": 1.0,
        "threads": 1,
        "model": {"config": CONFIG},
        "data": {"train": ["a.npy", "b.npy"]},
        "optimizer": {"lr": 3e-3},
        "checkpoint": {"every_steps": 2},
        **changes,
    }
    path = folder / "run.toml"
    path.write_text(to_toml(run))
    return path


def to_toml(data: dict[str, Any], prefix: str = "") -> str:
    """Plain data as TOML: values first, then a table for each dictionary."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in data.items() if not isinstance(value, dict)]
    for key, value in data.items():
        if isinstance(value, dict):
            lines += [f"\n[{prefix}{key}]", to_toml(value, f"{prefix}{key}.")]
    return "\n".join(lines)


def checkpoints(run_file: Path) -> list[Path]:
    return whole(run_file.parent / "out" / FOLDER)


def state(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint that one process wrote."""
    (file,) = checkpoint.glob("*.safetensors")
    return load_file(file)


def losses(run_file: Path) -> dict[int, float]:
    figures = read_figures(run_file.parent / "out")
    return {step: line["loss"] for step, line in figures.items() if "loss" in line}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Bit for bit."""
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different, different


def ids_read(run_file: Path, place: int = 0) -> np.ndarray:
    """Every id that a process of `run_processes` read in training, in all its attempts."""
    return np.fromfile(f"{run_file}.{place}.ids", dtype=np.int64)


def run_processes(
    run_file: Path | list[Path], *, world: int = 1, rank: int = 0, fault: str = "none", resume: bool = False
) -> list[tuple[int, str]]:
    """Run `world` processes of a run, or one of each run file, one of which meets a fault (faulty.py).

    (exit code, standard error) of each.
    """
    files = run_file if isinstance(run_file, list) else [run_file] * world
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meet = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    context = forking()
    started: list[Any] = []
    for place, path in enumerate(files):
        environment = {**os.environ, **meet}
        if len(files) > 1:
            environment |= {"RANK": str(place), "LOCAL_RANK": str(place), "WORLD_SIZE": str(len(files))}
        asked = (path, place, environment, fault if place == rank else "none", resume)
        started.append(context.Process(target=faulty.start, args=asked))
        started[-1].start()
    codes = exit_codes(started)
    told = [Path(f"{file}.{place}.err").read_text(errors="replace") for place, file in enumerate(files)]
    return list(zip(codes, told, strict=True))


def exit_codes(processes: list[Any]) -> list[int]:
    """The exit codes of a run's processes; none of them outlives a run that takes too long."""
    until = time.monotonic() + LIMIT
    try:
        for process in processes:
            process.join(max(0.0, until - time.monotonic()))
            assert process.exitcode is not None, f"its processes take more than {LIMIT:g} s"
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [process.exitcode for process in processes]


def spoil_model(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Any], object]) -> None:
    """Let runs train a model that `spoil` has changed."""
    build = learner.build_model

    def spoiled(*arguments: Any) -> Any:
        model, mesh = build(*arguments)
        spoil(model)
        return model, mesh

    monkeypatch.setattr(learner, "build_model", spoiled)


def before_checkpoints(monkeypatch: pytest.MonkeyPatch, wait: Callable[[DigestWriter], object]) -> None:
    """Call `wait` before the data of a checkpoint are written, as on a slow disk."""
    write = DigestWriter.write_data

    def slow(writer: DigestWriter, *parts: Any) -> Any:
        wait(writer)
        return write(writer, *parts)

    monkeypatch.setattr(DigestWriter, "write_data", slow)
