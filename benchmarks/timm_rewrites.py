"""Every rewrite applied eagerly to timm's models, and how far its answers are from the original's.

    python benchmarks/timm_rewrites.py [NAME …]

Nothing is compiled or timed: a minute a model. A loss ten times beyond what a technique declares is a fault of ours,
and the exit status is 1.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterator

import torch

import hundred_models
from torchwright.core.errors import RefusedTechnique
from torchwright.hardware.devices import get_device
from torchwright.optimization.engines.apply import apply_steps, make_target
from torchwright.optimization.search.attempt import WRONG
from torchwright.optimization.techniques.base import Phase, Technique, techniques
from torchwright.optimization.techniques.shared.wrapping import outputs, worst_error
from torchwright.workloads.base import Case
from torchwright.workloads.module import ModuleWorkload

PHASES = (Phase.GRAPH, Phase.DTYPE, Phase.WEIGHTS, Phase.ATTENTION)
"""Those whose techniques change the model itself, and the engines' that fold before they convert."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = [name for name in hundred_models.MODELS if name.startswith(hundred_models.TIMM)]
    parser.add_argument("names", nargs="*", default=every, metavar="NAME")
    wrong = 0
    for name in parser.parse_args().names:
        begun = time.perf_counter()
        for step, error, changed, is_wrong in rewrites(name):
            wrong += is_wrong
            print(f"{name}: {step}: {changed}, {error:.2%}{'  WRONG' if is_wrong else ''}", flush=True)
        print(f"{name}: {time.perf_counter() - begun:.0f} s", flush=True)
    print(f"{wrong} wrong")
    return int(bool(wrong))


def rewrites(name: str) -> Iterator[tuple[str, float, str, bool]]:
    """Step, relative error on inputs that no step has seen, what it changed, and whether that is far too much."""
    model, inputs = hundred_models.make(name)
    assert isinstance(inputs, tuple)
    device = get_device("cpu").identify()
    torch.manual_seed(3)
    fresh = [Case(name="fresh", args=tuple(torch.randn_like(x) for x in inputs))]
    expected = outputs(model, fresh)
    for technique in candidates():
        target = make_target(ModuleWorkload(model, inputs), device)
        target.properties |= {"compiled", "exportable", "sdpa"} & technique.needs
        try:
            apply_steps(target, [technique.step()])
            error = worst_error(expected, outputs(target.model, fresh))
        except RefusedTechnique:
            continue
        except Exception as fault:  # of one technique on one model: its line, and on with the others
            yield str(technique.step()), float("inf"), f"{type(fault).__name__}: {fault}"[:200], True
            continue
        changed = ", ".join(f"{row.changed} of {row.total} {row.unit}" for row in target.coverage)
        yield str(technique.step()), error, changed, error > WRONG * technique.expected_loss
        del target
        gc.collect()


def candidates() -> Iterator[Technique]:
    for _, cls in techniques:
        if cls.phase in PHASES or cls.name == "openvino":
            yield cls()


if __name__ == "__main__":
    sys.exit(main())
