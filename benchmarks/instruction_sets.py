"""Our linear layers by instruction set: what machines without AVX-512 have of them.

    python benchmarks/instruction_sets.py [--features 2048] [--rows 1,64] [--rounds 10]

A layer of each scheme on each instruction set that this machine has, the portable code not, on one thread, in turns;
what counts is that thread's processor time, the least of the rounds. Several layers follow each other, so that their
weights come from beyond the first two levels of cache. Weights are random.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch

from convolutions import least
from torchwright.core.scheme import scheme_of
from torchwright.hardware.kernels.cpu import build
from torchwright.hardware.kernels.linear import PackedLinear

SCHEMES = ("bf16", "w8a8", "w4a8", "w4a16")
LAYERS = 6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--features", type=int, default=2048)
    parser.add_argument("--rows", default="1,64")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    if fault := build.load_fault():
        parser.error(f"no kernels: {fault}")
    torch.set_num_threads(1)
    sets = [name for name in torch.ops.torchwright.isas() if name != "portable"]
    print(f"torch {torch.__version__}, one thread, {options.features} by {options.features}")
    for scheme in SCHEMES:
        layers = [made(scheme, options.features) for _ in range(LAYERS)]
        for rows in map(int, options.rows.split(",")):
            x = torch.randn(rows, options.features)
            seconds = least([partial(called, name, layers, x) for name in sets], options.rounds)
            print(
                f"  {scheme:5} {rows:3} rows: " + ", ".join(map(partial(said, layers[0], x), sets, seconds)),
                flush=True,
            )


def made(scheme: str, features: int) -> PackedLinear:
    return PackedLinear(torch.randn(features, features) / features**0.5, None, scheme_of(scheme, 32))


def called(isa: str, layers: list[PackedLinear], x: torch.Tensor) -> None:
    torch.ops.torchwright.use_isa(isa)
    for layer in layers:
        layer(x)


def said(layer: PackedLinear, x: torch.Tensor, isa: str, seconds: float) -> str:
    """The time of one layer, what is read of its weights, and its arithmetic."""
    each = seconds / LAYERS
    rate = 2 * len(x) * layer.in_features * layer.out_features / each
    return f"{isa} {each * 1e6:.0f} us, {layer.packed.numel() / each / 1e9:.1f} GB/s, {rate / 1e9:.0f} Gop/s"


if __name__ == "__main__":
    main()
