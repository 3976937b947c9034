"""What one optimizer step costs, by how it is computed: each update on the bundled model's parameters, in turns.

    python benchmarks/optimizer_step.py [--turns N] [--threads T] [--model FOLDER] [--json FILE] [--only …]

The gradients are the same random ones for all. Ratios are medians over the turns, of the wall clock and of this
process's processor time (beside other work the latter counts), against fused AdamW, which `torchwright train` takes.
`foreach_map` is AdamW in the operators of `torch._higher_order_ops.foreach_map`, compiled.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch._higher_order_ops.foreach_map import foreach_map

import turns
from torchwright.models.decoder import read_decoder_config
from torchwright.train.model import Transformer
from torchwright.train.run.config import Optimizer
from torchwright.train.run.optimizer import Optimizers

BUNDLED = Path(__file__).parents[1] / "src" / "torchwright" / "workloads" / "bundled"
RATE, BETAS, EPS, DECAY = 3e-4, (0.9, 0.95), 1e-8, 0.1
FUSED = "adamw, fused"
Step = Callable[[], None]


def parameters(folder: Path) -> list[torch.nn.Parameter]:
    model = Transformer(read_decoder_config(folder))
    model.reset_parameters(0)
    found = list(model.parameters())
    for parameter in found:
        parameter.grad = torch.randn_like(parameter)
    return found


def adamw(folder: Path, *, compiled: bool = False, **how: bool) -> Step:
    optimizer = torch.optim.AdamW(parameters(folder), lr=RATE, betas=BETAS, weight_decay=DECAY, **how)
    return torch.compile(optimizer.step) if compiled else optimizer.step


def mapped(folder: Path) -> Step:
    """AdamW's formula for one tensor, mapped over all of them inside one compiled graph."""
    those = parameters(folder)
    gradients = [parameter.grad for parameter in those]
    first, second = ([torch.zeros_like(p) for p in those] for _ in range(2))
    count = torch.zeros(())

    def update(p, g, m, v, count):  # type: ignore[no-untyped-def]
        m.lerp_(g, 1 - BETAS[0])
        v.mul_(BETAS[1]).addcmul_(g, g, value=1 - BETAS[1])
        scale = RATE / (1 - BETAS[0] ** count)
        return p.mul_(1 - RATE * DECAY) - scale * m / ((v / (1 - BETAS[1] ** count)).sqrt() + EPS)

    @torch.compile
    def whole() -> None:
        count.add_(1)
        moved = foreach_map(update, those, gradients, first, second, count)
        for parameter, value in zip(those, moved, strict=True):
            parameter.copy_(value)

    def step() -> None:
        with torch.no_grad():
            whole()

    return step


def ours(folder: Path, name: str, *, compiled: bool = False) -> Step:
    """One of the run file's optimizers; gradients are put back, since a step lets them go.

    Those of few bits are compiled by torchao; `compiled` compiles `torch.optim`'s steps of the others.
    """
    model = Transformer(read_decoder_config(folder))
    model.reset_parameters(0)
    kept = {parameter: torch.randn_like(parameter) for parameter in model.parameters()}
    optimizers = Optimizers(model, Optimizer.model_validate({"name": name}), compiled=True)

    if compiled:
        for optimizer in optimizers.optimizers:
            optimizer.step = torch.compile(optimizer.step)

    def step() -> None:
        for parameter, gradient in kept.items():
            parameter.grad = gradient
        optimizers.step(1.0)

    return step


CONTENDERS: dict[str, Callable[[Path], Step]] = {
    FUSED: lambda folder: adamw(folder, fused=True),
    "adamw, foreach": lambda folder: adamw(folder, foreach=True),
    "adamw, one by one": lambda folder: adamw(folder, foreach=False),
    "adamw, compiled": lambda folder: adamw(folder, compiled=True, foreach=True),
    "adamw, foreach_map compiled": mapped,
    "adamw8bit, compiled": lambda folder: ours(folder, "adamw8bit"),
    "adamw4bit, compiled": lambda folder: ours(folder, "adamw4bit"),
    "adafactor": lambda folder: ours(folder, "adafactor"),
    "muon": lambda folder: ours(folder, "muon"),
    "adafactor, compiled": lambda folder: ours(folder, "adafactor", compiled=True),
    "muon, compiled": lambda folder: ours(folder, "muon", compiled=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--model", type=Path, default=BUNDLED, help="a folder whose config.json has the shape"
    )
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=CONTENDERS, help="and fused AdamW")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    turns.print_machine()
    steps: dict[str, Step] = {}
    first: dict[str, float] = {}
    for name in dict.fromkeys((FUSED, *options.only)):
        steps[name] = CONTENDERS[name](options.model)
        start = time.perf_counter()
        try:
            steps[name]()
            steps[name]()
        except Exception as error:  # a compiler that cannot is a result
            print(f"{name}: does not run: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
            del steps[name]
            continue
        first[name] = time.perf_counter() - start
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for _ in range(options.turns):
        for name, step in steps.items():
            start = time.perf_counter(), time.process_time()
            step()
            times[name].append((time.perf_counter() - start[0], time.process_time() - start[1]))
    base = times[FUSED]
    print("| step | ms, median | against fused | by processor time | first two calls, s |")
    print("|---|---:|---:|---:|---:|")
    rows = []
    for name, found in times.items():
        wall, cpu = turns.median_ratios(base, found)
        rows.append({"step": name, "seconds": found, "speedup": wall, "processor": cpu, "first": first[name]})
        middle = 1e3 * statistics.median(seconds for seconds, _ in found)
        print(f"| {name} | {middle:.1f} | {wall:.2f}x | {cpu:.2f}x | {first[name]:.1f} |")
    turns.write_json(options.json, rows)


if __name__ == "__main__":
    main()
