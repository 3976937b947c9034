"""Random small runs, each trained two steps and held against one process in float64: `search_runs.py FOLDER SEED …`.

A seed decides a run file: model, layout, precision, compilation, recomputation, optimizer, accumulation. The reference
is the same file without layout, precision, compilation, recomputation and micro-batches, with every tensor in float64.
A line of JSON for each seed says what came of it: `equal`, `refused` or `wrong`, and why.

All processes are forked from one that has imported everything, since that takes longer than the runs.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")
sys.path.append(str(Path(__file__).parents[1]))  # where pytest finds the tests' own modules

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402, F401
from runs import CONFIG, MIXTURE, make_run  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from torchwright.cli.failures import exit_code  # noqa: E402
from torchwright.models.decoder import read_decoder_config  # noqa: E402
from torchwright.train.model import Transformer, save_folder  # noqa: E402
from torchwright.train.run.loop import train as loop  # noqa: E402
from torchwright.train.run.loop import trainer  # noqa: E402, F401
from torchwright.train.run.observe.metrics import read_figures  # noqa: E402

LIMIT = 240
"""Seconds for one run; compiling in four processes takes one of them."""
MODELS: dict[str, dict[str, Any]] = {
    "tied": CONFIG,
    "untied": CONFIG | {"tie_word_embeddings": False, "num_hidden_layers": 3},
    "biases": CONFIG
    | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_key_value_heads": 4},
    "windowed": CONFIG
    | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 12},
    "mixture": CONFIG | MIXTURE,
}
NEAR = {"fp32": 2e-4, "bf16": 0.06, "float8": 0.3, "mxfp8": 0.3, "mxfp4": 0.8}
"""How far each parameter's change over the two steps may be from the reference's, of its length: by precision,"""
LEAST = {"adamw": 0.0, "adamw8bit": 0.02, "muon": 0.02}
"""and at least: moments in 8 bits, and Muon's matrices in bfloat16."""


def search(seed: int) -> dict[str, Any]:
    """The run that a seed stands for, by what it changes of `make_run`'s."""
    dice = random.Random(seed)
    axes = ["dp_replicate", "dp_shard", "cp", "tp"]
    name = dice.choice(["adamw", "adamw", "adamw", "adamw8bit", "muon"])
    if name == "muon" and dice.random() < 0.7:
        axes = ["dp_replicate"]  # others are refused
    layout = dict.fromkeys(axes, 1)
    for _ in range(dice.choice([0, 1, 1, 1, 2, 2])):
        layout[dice.choice(axes)] *= 2
    model = dice.choice([*MODELS, "mixture"])
    if model == "mixture" and (layout.get("dp_shard", 1) * layout.get("cp", 1) > 1 or dice.random() < 0.1):
        layout["ep"] = dice.choice([1, 2])
    precisions = ["fp32"] * 5 + ["bf16"] * 3
    if (
        max(layout.get("tp", 1), layout.get("ep", 1)) == 1 or dice.random() < 0.1
    ):  # elsewhere these are refused
        precisions += ["float8_tensorwise", "float8_rowwise", "mxfp8", "mxfp4"]
    # With this eps a small gradient makes a small step, as with SGD, so that its rounding stays small as well.
    optimizer = {"name": name, "lr": 3e-3, "eps": 1e-2, "weight_decay": dice.choice([0.0, 0.1])}
    context = dice.choice([32, 48, 64])
    batch_tokens = context * dice.choice([4, 8, 8, 16, 16])
    return {
        "context": context,
        "batch_tokens": batch_tokens,
        "tokens": 2 * batch_tokens,
        "micro_batches": dice.choice([1, 1, 2, 4]),
        "precision": dice.choice(precisions),
        "compile": dice.random() < 0.12,
        "recompute": dice.choice(["none", "selective", "full"]),
        "clip": dice.choice([1.0, 0.1, False]),
        "model": {"folder": f"../{model}"},
        "data": {"train": ["a.npy", "b.npy"], "begin_every": dice.choice([0, 2]), "seed": seed},
        "optimizer": optimizer,
        "schedule": {"warmup_tokens": dice.choice([0, 2 * batch_tokens]), "final": 0.5},
        "checkpoint": {},
        "layout": {axis: degree for axis, degree in layout.items() if degree > 1},
    }


def plain(run: dict[str, Any]) -> dict[str, Any]:
    """What the reference trains."""
    optimizer = run["optimizer"]
    if optimizer["name"] == "adamw8bit":
        optimizer = optimizer | {"name": "adamw"}
    changes = {"precision": "fp32", "compile": False, "recompute": "none", "micro_batches": 1, "layout": {}}
    return run | changes | {"optimizer": optimizer}


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How the processes of a run ended."""

    codes: list[int]
    told: list[str]
    """What each wrote to its standard error."""


def start(path: Path, world: int, *, double: bool = False) -> Ended:
    """Train a run file in `world` processes; those that take too long are killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def train(place: int) -> int:
        if double:
            torch.set_default_dtype(torch.float64)
        if world > 1:
            os.environ |= {"RANK": str(place), "LOCAL_RANK": str(place), "WORLD_SIZE": str(world)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return exit_code(lambda words: bool(loop.train(path, live=False).signal), [])

    said = [path.with_name(f"{place}.err") for place in range(world)]
    children = [fork(lambda place=place: train(place), said[place]) for place in range(world)]
    codes = wait(children)
    return Ended(codes=codes, told=[file.read_text(errors="replace") for file in said])


def fork(work: Callable[[], int], said: Path) -> int:
    """A child that does `work`; its id."""
    child = os.fork()
    if child:
        return child
    os.setpgid(0, 0)
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    code = 1
    try:
        code = work()
    finally:
        sys.stderr.flush()
        os._exit(code)


def wait(children: list[int]) -> list[int]:
    """The exit codes of `children`, and that of SIGKILL for those that had to be ended."""
    until, codes = time.monotonic() + LIMIT, dict[int, int]()
    while len(codes) < len(children):
        for child in children:
            if child not in codes and (done := os.waitpid(child, os.WNOHANG))[0]:
                codes[child] = os.waitstatus_to_exitcode(done[1])
            elif child not in codes and time.monotonic() > until:
                os.killpg(child, signal.SIGKILL)
        time.sleep(0.02)
    return [codes[child] for child in children]


def make_models(folder: Path) -> None:
    """The weights that every run starts from, as folders."""

    def make() -> int:
        for name, config in MODELS.items():
            source = folder / f"{name}.source"
            source.mkdir(parents=True)
            (source / "config.json").write_text(json.dumps(config))
            model = Transformer(read_decoder_config(source))
            model.reset_parameters(1)
            save_folder(model, model.config, folder / name, source=source)
        return 0

    folder.mkdir(parents=True, exist_ok=True)
    assert wait([fork(make, folder / "models.err")]) == [0], (folder / "models.err").read_text()


def verdict(folder: Path, seed: int) -> tuple[str, str]:
    """What came of a seed's run, and why."""
    run = search(seed)
    world = 1
    for axis, degree in run["layout"].items():
        world *= 1 if axis == "ep" else degree
    ended = start(make_run(folder / f"{seed}", **run), world)
    if all(code == 2 for code in ended.codes):
        return "refused", ended.told[0].strip().splitlines()[-1]
    if any(ended.codes):
        return "wrong", f"exit codes {ended.codes}: {max(ended.told, key=len)[-2000:]}"
    reference = start(make_run(folder / f"{seed}.plain", **plain(run)), 1, double=True)
    if any(reference.codes):
        return "wrong", f"the reference: {reference.told[0][-2000:]}"
    far = differences(run, folder / f"{seed}" / "out", folder / f"{seed}.plain" / "out", folder)
    return ("wrong", "; ".join(far)) if far else ("equal", "")


def differences(run: dict[str, Any], out: Path, plain_out: Path, folder: Path) -> list[str]:
    """Losses, norms and changes of parameters that are further from the reference's than rounding explains."""
    optimizer = run["optimizer"]["name"]
    near = max(NEAR[run["precision"].split("_")[0]], LEAST[optimizer])
    found: list[str] = []
    ours, theirs = read_figures(out), read_figures(plain_out)
    for step in (1, 2):
        for name, allowed in (("loss", near / 20), ("grad_norm", near / 2)):
            apart = abs(ours[step][name] / theirs[step][name] - 1)
            if not apart <= allowed:
                found.append(f"{name} of step {step}: {ours[step][name]} for {theirs[step][name]}")
    begin = weights(folder / Path(run["model"]["folder"]).name)
    trained, wanted = weights(out / "model"), weights(plain_out / "model")
    for name, tensor in begin.items():
        moved, should = trained[name] - tensor, wanted[name] - tensor
        apart, length = float((moved - should).norm()), float(should.norm())
        factor = 1
        if run["precision"] != "fp32" and "block_sparse_moe" in name:
            factor = 4  # a token between two experts goes to another one for a rounding
        if optimizer == "muon" and tensor.dim() == 2 and ".layers." in name:
            factor = 10  # it makes as much of a gradient's small directions, where rounding lies, as of its large ones
        # Weights are kept in float32; one whose gradient is nothing but rounding moves by nothing but rounding.
        rounding = 2e-7 * float(tensor.norm()) + near * 1e-5 * tensor.numel() ** 0.5
        if not apart <= min(0.9, factor * near) * length + rounding:
            found.append(f"{name} is off by {apart / length:.2%} of its change of {length:.2g}")
    return found


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    place = Path(sys.argv[1])
    make_models(place)
    for seed in map(int, sys.argv[2:]):
        begun = time.monotonic()
        status, why = verdict(place, seed)
        line = {"seed": seed, "status": status, "why": why, "seconds": round(time.monotonic() - begun, 1)}
        print(json.dumps(line), flush=True)
