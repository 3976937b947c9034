"""1x1 and depthwise convolutions of small nets, each on Torchwright's kernel and on oneDNN's as Inductor calls it.

    [ONEDNN_MAX_CPU_ISA=AVX2] python benchmarks/convolutions.py [MODEL …] [--batch 1,8] [--dtype float32] [--isa avx2]
        [--rounds 40]

Every different layer of the models takes turns between the two, with a ReLU after it in both, on one thread; what
counts is that thread's processor time, in which others' turns on a busy machine are not, the least of the rounds. A
model's line is the sum over its layers, each as often as the model has it. Weights are random. oneDNN's instruction set
is chosen by its own variable.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from modules import VISION, make
from torchwright.hardware.kernels import conv
from torchwright.hardware.kernels.cpu import build
from torchwright.optimization.techniques.packed_convolution import FEWEST
from torchwright.optimization.techniques.shared.wrapping import named

MODELS = ("mobilenet_v3_small", "efficientnet_b0", "convnext_tiny", "shufflenet_v2")
CALLS = 3
"""Of one turn."""
Layer = tuple[int, int, int, int, int, int, int]
"""Channels, features, height, width, window, stride, groups."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--isa", help="the instruction set of our kernels, by default the best")
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    if fault := build.load_fault():
        parser.error(f"no kernels: {fault}")
    torch.set_num_threads(1)
    if options.isa:
        torch.ops.torchwright.use_isa(options.isa)
    dtype = getattr(torch, options.dtype)
    print(f"torch {torch.__version__}, {torch.ops.torchwright.isa()}, one thread, {options.dtype}")
    for model in options.models:
        for batch in map(int, options.batch.split(",")):
            compare(model, batch, dtype, options.rounds)


def compare(model: str, batch: int, dtype: torch.dtype, rounds: int) -> None:
    """Prints a line for each layer, and one for all of them."""
    total = [0.0, 0.0]
    for layer, count in layers(model, batch).items():
        C, N, H, W, window, stride, groups = layer
        theirs, ours = least(contenders(layer, batch, dtype), rounds)
        total = [total[0] + count * theirs, total[1] + count * ours]
        kind = "depthwise" if groups > 1 else "dense"
        print(
            f"  {batch} x {C:4} -> {N:4} at {H:3} x {W:3}, {kind:9} {window} x {window} / {stride}, {count} times: "
            f"oneDNN {theirs * 1e6:7.1f} us, ours {ours * 1e6:7.1f}, {theirs / ours:.2f}x",
            flush=True,
        )
    print(
        f"{model}, batch {batch}: oneDNN {total[0] * 1e3:.2f} ms, ours {total[1] * 1e3:.2f}, {total[0] / total[1]:.2f}x"
    )


def layers(model: str, batch: int) -> Counter[Layer]:
    """The 1x1 and depthwise layers that a call of the model makes, and how often."""
    found: Counter[Layer] = Counter()

    def note(layer: Any, args: tuple[Any, ...], _: Any) -> None:
        square = layer.kernel_size[0] == layer.kernel_size[1] and layer.stride[0] == layer.stride[1]
        deep = layer.groups == layer.in_channels == layer.out_channels
        if square and (deep or (layer.groups == 1 and layer.kernel_size == (1, 1))):
            C, H, W = args[0].shape[1:]
            found[C, layer.out_channels, H, W, layer.kernel_size[0], layer.stride[0], layer.groups] += 1

    module, inputs = make(VISION[model], batch)
    for _, layer in named(module, nn.Conv2d):
        layer.register_forward_hook(note)
    with torch.no_grad():
        module(*inputs)
    return found


def contenders(layer: Layer, batch: int, dtype: torch.dtype) -> list[Callable[[], torch.Tensor]]:
    """oneDNN's call and ours on one channels-last image."""
    C, N, H, W, window, stride, groups = layer
    x = torch.randn(batch, C, H, W, dtype=dtype).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(N, C // groups, window, window, dtype=dtype)
    bias, padding = torch.randn(N), (window - 1) // 2
    sizes = [padding] * 2, [stride] * 2, [1, 1], groups
    reorder: Any = torch._C._nn.mkldnn_reorder_conv2d_weight  # type: ignore[attr-defined]
    theirs = reorder(weight.to_mkldnn(), *sizes, x.shape)
    fused: Any = torch.ops.mkldnn._convolution_pointwise
    own: Any = torch.ops.torchwright
    ours, shape = conv.pack_bias(bias, N), ([window] * 2, [stride] * 2, [padding] * 2)
    narrow = bias.to(dtype)
    if groups > 1:
        deep = conv.pack_depthwise(weight)
        call: Callable[[], torch.Tensor] = lambda: own.conv_depthwise(x, deep, ours, *shape, "relu")
    else:
        tiles = own.isa() == "amx" and batch * H * W >= FEWEST * stride**2
        dense = (conv.pack_pairs if tiles or dtype == torch.bfloat16 else conv.pack_dense)(weight)
        call = lambda: own.conv_dense(x, dense, ours, *shape, N, "relu", None)
    return [lambda: fused(x, theirs, narrow, *sizes, "relu", [], ""), call]


def least(calls: Sequence[Callable[[], Any]], rounds: int) -> list[float]:
    """Seconds of processor time of one call of each, the least of the rounds; they take turns."""
    best = [float("inf")] * len(calls)
    for call in calls:
        call()
    for _ in range(rounds):
        for i, call in enumerate(calls):
            begun = time.clock_gettime(time.CLOCK_THREAD_CPUTIME_ID)
            for _ in range(CALLS):
                call()
            best[i] = min(best[i], (time.clock_gettime(time.CLOCK_THREAD_CPUTIME_ID) - begun) / CALLS)
    return best


if __name__ == "__main__":
    main()
