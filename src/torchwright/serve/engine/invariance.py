"""Check that a model computes a row bitwise the same in any batch, on which the engine's promise rests.

The compiled kernels do: each says so in its own test. PyTorch's operators choose their way of summing by the number
of rows, so a model that uses them for its sums does not.
"""

from __future__ import annotations

from torch import nn

from torchwright.core.errors import WorkloadError
from torchwright.hardware.kernels import ops
from torchwright.hardware.kernels.cpu import build
from torchwright.hardware.kernels.limits import LANES
from torchwright.models.decoder.feed_forward import RoutedExperts
from torchwright.models.decoder.model import Decoder
from torchwright.models.decoder.paged_model import PagedModel


def require_invariance(model: PagedModel, *, asked: bool | None) -> None:
    """Raise `WorkloadError`, saying why and what to do, for a model whose rows depend on their company.

    Where nobody `asked`, None, a model on transformers' own layers is let through: it cannot compute otherwise.
    """
    if asked is False or (asked is None and not isinstance(model, Decoder)):
        return
    found, cure = _variant(model) or (None, None)
    if found is not None:
        raise WorkloadError(
            "this model cannot answer a request alike in any company",
            found=found,
            next=f"{cure}--no-deterministic serves it without that promise",
        )


def _variant(decoder: PagedModel) -> tuple[str, str] | None:
    """Return the part that is not invariant, and the beginning of the advice."""
    if not isinstance(decoder, Decoder):
        return "it runs on transformers' own layers", ""
    if not ops.fast(decoder.embedding):
        return build.load_fault() or f"{decoder.embedding.dtype} on {decoder.embedding.device.type}", ""
    if any(isinstance(module, nn.Linear) for module in decoder.modules()):
        return "linear layers of PyTorch", "--dtype bf16 or --quantize takes the compiled ones; "
    if decoder.config.head_dim % LANES:
        return (
            f"heads of {decoder.config.head_dim} dimensions, which the compiled attention does not take",
            "",
        )
    if any(
        isinstance(module, RoutedExperts) and module.packed_router is None for module in decoder.modules()
    ):
        return (
            "a mixture of experts whose router is an operator of PyTorch",
            "--dtype bf16 takes the compiled one; ",
        )
    return None
