"""The cost of checking a call's inputs for NaN and infinity: before an OpenVINO call, after it, and not at all.

python benchmarks/optimize/input_check.py [--model mobilenetv4_conv_small] [--turns 120]

Inputs are cold (each call has one of its own, 512 MB together) or warm (the same one). Median of the calls in turn, and
of the paired shares over the call without a check. OpenVINO in bfloat16 where the processor has it, batch size 1.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import openvino as ov  # pyright: ignore[reportMissingImports]
import timm  # pyright: ignore[reportMissingImports]
import torch

from torchwright.optimization.engines.dispatch.guards import Check
from torchwright.optimization.engines.dispatch.spec import Guard

BYTES = 512 * 2**20
"""All cold inputs together: more than a shared cache holds."""


def compiled(name: str, example: torch.Tensor) -> Any:
    """Return a request of the model on two threads."""
    model = ov.convert_model(timm.create_model(name, pretrained=False).eval(), example_input=example)
    model.reshape(list(example.shape))
    core = ov.Core()
    able = core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    how = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "PERFORMANCE_HINT": "LATENCY"}
    how["INFERENCE_PRECISION_HINT"] = "bf16" if "BF16" in able else "f32"
    return core.compile_model(model, "CPU", how).create_infer_request()


def main() -> None:
    """Print a row for each kind of input."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="mobilenetv4_conv_small")
    parser.add_argument("--turns", type=int, default=120)
    asked = parser.parse_args()
    example = torch.randn(1, 3, 224, 224)
    request, check = compiled(asked.model, example), Check([Guard(tensor=0, values="finite")])
    inputs = [example.numpy().copy() for _ in range(BYTES // example.nbytes)]
    ways: dict[str, Callable[[Any], Any]] = {
        "none": lambda array: request.infer([array], share_inputs=True),
        "before": lambda array: (check([array]), request.infer([array], share_inputs=True)),
        "after": lambda array: (request.infer([array], share_inputs=True), check([array])),
    }
    for kind in ("cold", "warm"):
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        number = 0
        for turn in range(asked.turns + 5):
            for name in list(ways)[turn % 3 :] + list(ways)[: turn % 3]:
                number = number + 1 if kind == "cold" else 0
                begun = time.perf_counter()
                ways[name](inputs[number % len(inputs)])
                if turn >= 5:
                    seconds[name].append(time.perf_counter() - begun)
        base = statistics.median(seconds["none"])
        told = [f"{kind}: {base * 1e3:.3f} ms without"]
        for name in ("before", "after"):
            paired = np.array(seconds[name]) / np.array(seconds["none"]) - 1
            share = statistics.median(seconds[name]) / base - 1
            told.append(f"{name} {share:+.1%} (paired {np.median(paired):+.1%})")
        print("; ".join(told), flush=True)


if __name__ == "__main__":
    main()
