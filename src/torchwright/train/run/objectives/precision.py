"""Low precision from outside the model: autocast, and products that round their operands to float8 or MX formats.

On a GPU float8 runs on its matrix units; elsewhere the same rounding is emulated, with products of the rounded values
in higher precision. MX formats are emulated everywhere.
"""

from __future__ import annotations

import contextlib
import functools
import math
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import local_map

from torchwright.core.quiet import errors_alone, quiet_import
from torchwright.hardware.devices.cpu import onednn_computes
from torchwright.train.model.blocks import Attention, Experts, compute_experts
from torchwright.train.model.recurrent import EXACT
from torchwright.train.run.config.data_section import RunError
from torchwright.train.run.config.run import Gather, Precision
from torchwright.train.run.objectives.rowwise import gather_by_rows

MX_BLOCK = 32
TENSORWISE: Precision = "float8_tensorwise"
"""The recipe with one scale for a whole matrix, which is the largest value of all processes' parts."""
MULTIPLE = {"float8": 16, "mx": MX_BLOCK}
"""Both sides of a matrix must be a multiple of this number."""


def slow_in_bf16(device: str) -> bool:
    """Check whether products in bfloat16 take several times as long as in float32: a CPU without instructions for it.

    A step of the bundled model took 8 times as long on a Zen 4 with AVX2 alone.
    """
    return device == "cpu" and not onednn_computes("bfloat16")


def autocast(precision: Precision, device: str) -> contextlib.AbstractContextManager[Any]:
    """Return the context of a forward pass: products in bfloat16, except for `fp32`; weights stay float32."""
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device, torch.bfloat16)


def convert(
    model: nn.Module, precision: Precision, device: str, tp: int = 1, *, gather: Gather = None
) -> list[str]:
    """Replace the linear layers of the decoder's layers as `precision` says; their names.

    Under MX formats experts' matrices are rounded too, and named. The embedding, the output layer and routers stay as
    they are, and under float8 experts. So do the layers that decide a recurrence's decay, and the small matrices of
    Gemma 4's own inputs. With `gather` float8 layers' matrices are such as FSDP gathers in 8 bits.
    Under tensor parallelism float8's scales are the largest values of whole matrices and rows all the same: DTensor
    takes a maximum over the processes that hold parts.
    Raises `RunError` if no layer has sides that the format takes, as a whole or as a process's part under tensor
    parallelism over `tp` processes.
    """
    family = "float8" if precision.startswith("float8") else "mx" if precision.startswith("mx") else None
    if family is None:
        return []
    step = MULTIPLE[family]
    chosen = [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and name.startswith("layers.")
        and not name.endswith(EXACT)
        and ".own_input." not in name
        and module.in_features % step == 0
        and module.out_features % step == 0
    ]
    parts = {name: _part(model, name, tp) for name in chosen}
    experts: dict[str, Experts] = {}
    if family == "mx":
        experts = {name: module for name, module in model.named_modules() if _takes_mx(module)}
        parts |= {name: module.gate.shape[1] // tp for name, module in experts.items()}
    cut = [name for name, part in parts.items() if part % step]
    if cut:
        raise RunError(
            f"precision '{precision}' takes matrices with sides that are multiples of {step}, also of parts",
            found=f"{cut[0]}, of which with tp={tp} a process has {parts[cut[0]]} rows or columns",
            next="choose a smaller tp, or precision 'bf16'",
        )
    if not (chosen or experts):
        raise RunError(
            f"precision '{precision}' has no layer to work on",
            allowed=f"linear layers of the decoder's layers with sides that are multiples of {step}",
            next="use precision 'bf16'",
        )
    if family == "float8":
        _to_float8(model, precision, set(chosen), device, gather)
    else:
        for name in chosen:
            _set(model, name, MXLinear.around(model.get_submodule(name), precision))
        # As MXLinear's: Inductor has no type for the shared power.
        linear: Any = torch.compiler.disable(functools.partial(_mx_linear, format=precision))
        for module in experts.values():
            module.compute = functools.partial(compute_experts, linear=linear)
    return [*chosen, *experts]


def _takes_mx(module: nn.Module) -> TypeGuard[Experts]:
    return isinstance(module, Experts) and all(side % MX_BLOCK == 0 for side in module.gate.shape[1:])


def _part(model: nn.Module, name: str, tp: int) -> int:
    """A process's part of the side of a matrix that tensor parallelism divides.

    It does not divide keys and values of fewer heads than processes (`parallel/tensor.py`).
    """
    linear, block = model.get_submodule(name), model.get_submodule(name.rpartition(".")[0])
    assert isinstance(linear, nn.Linear)
    side = linear.in_features if name.endswith((".o", ".down")) else linear.out_features
    if isinstance(block, Attention) and name.endswith((".k", ".v")) and side // block.head_dim % tp:
        return side
    return side // tp


def _to_float8(model: nn.Module, precision: Precision, chosen: set[str], device: str, gather: Gather) -> None:
    with quiet_import():
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    settings = Float8LinearConfig.from_recipe_name(precision.removeprefix("float8_"))
    by_rows = precision != TENSORWISE
    settings = replace(settings, enable_fsdp_float8_all_gather=gather == "float8" and not by_rows)
    native = device == "cuda" and torch.cuda.get_device_capability() >= (8, 9)
    convert_to_float8_training(
        model,
        module_filter_fn=lambda module, name: name in chosen,
        config=settings if native else replace(settings, emulate=True),
    )
    if gather == "float8" and by_rows:
        for name in chosen:
            layer = model.get_submodule(name)
            assert isinstance(layer, nn.Linear)
            gather_by_rows(layer)
    if device == "cpu":
        # torchao's layers take their inputs to bfloat16 under a GPU's autocast alone.
        for name in chosen:
            model.get_submodule(name).register_forward_pre_hook(_to_bfloat16)


@torch.no_grad()
def check_even(model: nn.Module) -> None:
    """Raise `RunError` for a float8 matrix of which processes hold different numbers of rows.

    torch gathers such parts padded with rows, which what is gathered in 8 bits does not have.
    """
    for name, weight in model.named_parameters():
        if not (isinstance(weight, DTensor) and hasattr(weight.to_local(), "fsdp_pre_all_gather")):
            continue
        sizes = zip(weight.placements, weight.device_mesh.shape, strict=True)
        parts = math.prod(size for placement, size in sizes if getattr(placement, "dim", None) == 0)
        if weight.shape[0] % parts:
            raise RunError(
                "gather = 'float8' takes matrices whose rows are divided evenly",
                found=f"{name} has {weight.shape[0]} rows for {parts} processes",
                next="choose another dp_shard or cp, or leave gather out",
            )


def renew_scales(model: nn.Module) -> None:
    """The scales in which `float8_tensorwise` matrices are gathered from now on, in one message for all of them.

    After each change of the weights: a matrix that has never had one takes its own as it is gathered.
    """
    with quiet_import():
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    # Of maxima over two dimensions of a mesh DTensor warns that sums would depend on their order.
    with errors_alone("torch.distributed.tensor._redistribute"):
        precompute_float8_dynamic_scale_for_fsdp(model)


def _to_bfloat16(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(x.bfloat16() for x in inputs)


class MXLinear(nn.Linear):
    """A linear layer whose three products take operands rounded to an MX format (OCP Microscaling 1.0).

    Blocks of 32 values along the axis that a product sums over share a power of two; the values are float8 (e4m3) or
    float4 (e2m1). The rounded values are multiplied in bfloat16 (emulation).
    """

    format: str

    @classmethod
    def around(cls, linear: nn.Module, precision: Precision) -> MXLinear:
        assert isinstance(linear, nn.Linear)
        new = cls(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        new.weight, new.bias, new.format = linear.weight, linear.bias, precision
        return new

    @torch.compiler.disable  # Inductor has no float8_e8m0fnu, the type of the shared power, on CPUs (torch 2.13)
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if isinstance(self.weight, DTensor):
            y = self._divided(input, self.weight)
        else:
            y = _mx_linear(input, self.weight, self.format)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def _divided(self, input: torch.Tensor, weight: DTensor) -> torch.Tensor:
        """Tensor parallelism: each process multiplies its columns or rows, or all, in the same blocks."""
        (placement,) = weight.placements
        whole, last, pending = [Replicate()], [Shard(input.ndim - 1)], [Partial()]
        given, gives, gradient = last, pending, last
        if not placement.is_shard(1):
            given = whole
            gives, gradient = (last, pending) if placement.is_shard(0) else (whole, whole)
        product: Any = local_map(
            functools.partial(_mx_linear, format=self.format),
            out_placements=gives,
            in_placements=(given, [placement]),
            in_grad_placements=(gradient, [placement]),
            device_mesh=weight.device_mesh,
        )
        return product(input, weight)


def _mx_linear(x: torch.Tensor, w_NK: torch.Tensor, format: str) -> torch.Tensor:
    y_MN: Any = _MXProduct.apply(x.flatten(0, -2), w_NK, format)
    return y_MN.unflatten(0, x.shape[:-1])


class _MXProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: torch.Tensor, w_NK: torch.Tensor, format: str) -> torch.Tensor:
        ctx.save_for_backward(x_MK, w_NK)
        ctx.format = format
        x, w = mx_round(x_MK.bfloat16(), format), mx_round(w_NK.bfloat16(), format)
        return x @ w.T

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x_MK, w_NK = ctx.saved_tensors
        g_MN = grads[0].bfloat16()
        w_KN = mx_round(w_NK.bfloat16().T.contiguous(), ctx.format)
        grad_x = mx_round(g_MN.contiguous(), ctx.format) @ w_KN.T
        # The sum over rows: their number may be no multiple of a block, and zeros change no product.
        g_NM = mx_round(_padded(g_MN.T), ctx.format)
        x_KM = mx_round(_padded(x_MK.bfloat16().T), ctx.format)
        return grad_x.to(x_MK.dtype), (g_NM @ x_KM.T).to(w_NK.dtype), None


@functools.cache
def _mx_tensor() -> Any:
    with quiet_import():
        from torchao.prototype.mx_formats.mx_tensor import MXTensor
    return MXTensor


def mx_round(x: torch.Tensor, format: str) -> torch.Tensor:
    """`x` (…, a multiple of 32), bfloat16, rounded to mxfp8 or mxfp4 and back."""
    if not x.numel():  # an expert without a token
        return x
    element = torch.float8_e4m3fn if format == "mxfp8" else torch.float4_e2m1fn_x2
    return _mx_tensor().to_mx(x, element, MX_BLOCK).dequantize(x.dtype)


def _padded(x_NM: torch.Tensor) -> torch.Tensor:
    return nn.functional.pad(x_NM, (0, -x_NM.shape[1] % MX_BLOCK)).contiguous()


def _set(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)
