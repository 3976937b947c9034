"""What each way of rounding the bundled model's weights loses: perplexity, divergence, bytes.

    python benchmarks/quantization.py [--model FOLDER] [--json FILE]

Held-out text in windows of 128 tokens with 8 decode steps after each, as `torchwright optimize` judges it; calibration
is text from the other end of the file. The budget and the interval are those of the search.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import turns
from torchwright.core.records import Step
from torchwright.core.scheme import BF16, GROUPS, W4A8, W4A16, W8A8, Scheme, scheme_of
from torchwright.hardware.devices import get_device
from torchwright.hardware.kernels.linear import PackedLinear
from torchwright.optimization.engines.apply import apply_steps, make_target
from torchwright.optimization.techniques.base import Target
from torchwright.optimization.techniques.shared.packed_weights import mean_products, mean_squares
from torchwright.optimization.techniques.shared.wrapping import replace_module
from torchwright.workloads.language import LanguageWorkload

Calibration = Callable[[Target], dict[nn.Module, torch.Tensor]]
CALIBRATIONS: dict[str, Calibration] = {
    "": lambda target: {},
    ", calibrated": mean_squares,
    ", GPTQ": mean_products,
}
WAYS: list[tuple[str, Scheme, Calibration]] = [
    ("bf16", BF16, CALIBRATIONS[""]),
    ("w8a8", W8A8, CALIBRATIONS[""]),
    *[
        (f"{scheme.name} g{group}{how}", scheme_of(scheme.name, group), calibration)
        for scheme in (W4A8, W4A16)
        for group in GROUPS
        for how, calibration in CALIBRATIONS.items()
    ],
]


def main() -> None:
    parser = argparse.ArgumentParser(description="Perplexity of the bundled model under each quantization.")
    parser.add_argument(
        "--model", metavar="FOLDER", help="a Hugging Face folder instead of the bundled model"
    )
    parser.add_argument("--json", metavar="FILE", help="write the rows here as they finish")
    options = parser.parse_args()
    turns.print_machine()
    workload = LanguageWorkload(options.model)
    original = workload.build()
    adapted = workload.adapt(original)
    with torch.inference_mode():
        reference = workload.observe(lambda case: adapted(*case.args, **case.kwargs), torch.float32)
    print("| weights | loss of perplexity | at most | KL | top-1 agreement | MB of linear weights |")
    print("|---|---|---|---|---|---|", flush=True)
    rows: list[dict[str, Any]] = []
    for name, scheme, calibration in WAYS:
        rows.append({"weights": name, **judge(workload, reference, scheme, calibration)})
        row = rows[-1]
        print(
            f"| {name} | {row['drop']:.2%} | {row['drop_high']:.2%} | {row['kl_divergence']:.5f} "
            f"| {row['top1_agreement']:.4f} | {row['bytes'] / 1e6:.2f} |",
            flush=True,
        )
        turns.write_json(options.json, rows)


def judge(
    workload: LanguageWorkload, reference: Any, scheme: Scheme, calibration: Calibration
) -> dict[str, Any]:
    """The metric of one way of rounding every linear layer, the output layer too."""
    target = make_target(workload, get_device("cpu").facts())
    apply_steps(target, (Step(name="native"),))
    importance = calibration(target)
    for layer in [module for module in target.model.modules() if isinstance(module, PackedLinear)]:
        if scheme != layer.scheme:
            packed = PackedLinear(layer.wide_weight(), layer.bias, scheme, importance=importance.get(layer))
            replace_module(target.model, layer, packed)
    with torch.inference_mode():
        seen = workload.observe(lambda case: target.model(*case.args, **case.kwargs), torch.bfloat16)
    quality = workload.compare(reference, seen)
    layers = [module for module in target.model.modules() if isinstance(module, PackedLinear)]
    count = sum(t.nbytes for layer in layers for t in layer.buffers())
    return {"drop": quality.drop, "drop_high": quality.drop_high, "bytes": count, **quality.extras}


if __name__ == "__main__":
    main()
