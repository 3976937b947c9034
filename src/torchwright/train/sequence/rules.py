"""Which rule each ATen operator has. What is not here cannot run on a part of the sequence."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx.node import Target

from torchwright.train.sequence import attention, pointwise, views
from torchwright.train.sequence.decision import Call, Decision

Rule = Callable[[Call], Decision]

RULES: dict[Rule, str] = {
    attention.fused_attention: "scaled_dot_product_attention",
    attention.matmul: "matmul mm bmm",
    attention.added_matmul: "addmm baddbmm",
    attention.linear: "linear",
    views.reshape: "reshape view _unsafe_view flatten unflatten unsqueeze squeeze",
    views.transpose: "transpose swapaxes swapdims",
    views.permute: "permute",
    views.transpose_matrix: "t numpy_T",
    views.expand: "expand",
    views.repeat: "repeat",
    views.repeat_interleave: "repeat_interleave",
    views.select: "select",
    views.cut: "slice narrow split split_with_sizes chunk",
    views.unbind: "unbind",
    views.cat: "cat concat",
    views.stack: "stack",
    views.pad: "pad constant_pad_nd",
    views.index: "index",
    views.embedding: "embedding",
    views.gather: "gather scatter scatter_add take_along_dim",
    views.one_hot: "one_hot",
    pointwise.pointwise: (
        "clone contiguous alias detach detach_ lift_fresh lift_fresh_copy zeros_like ones_like "
        "full_like empty_like rand_like randn_like dropout dropout_ native_dropout alpha_dropout copy_"
    ),
    pointwise.cast: "to _to_copy type_as",
    pointwise.elementwise_loss: (
        "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits"
    ),
    pointwise.token_loss: "cross_entropy_loss nll_loss nll_loss_nd",
    pointwise.along: (
        "softmax _softmax log_softmax _log_softmax cumsum cumprod flip roll sort topk argsort glu logcumsumexp"
    ),
    pointwise.normalization: "layer_norm rms_norm",
    pointwise.total: "sum",
    pointwise.mean: "mean",
    pointwise.over: "amax amin any all prod var std logsumexp argmax argmin norm linalg_vector_norm",
    pointwise.same_shape_whole: "new_zeros new_ones new_full new_empty",
}

_BY_NAME = {name: rule for rule, names in RULES.items() for name in names.split()}

LINEAR = frozenset(("mul", "div", "neg", "to", "_to_copy", "clone", "alias"))
"""Operators that may be applied to the terms of a sum instead of to the sum: to the first operand, the others whole."""


def name_of(target: Target) -> str:
    """Return `softmax` for `aten.softmax.int`; empty if it is not an ATen operator."""
    if isinstance(target, torch._ops.OpOverload) and target.namespace == "aten":
        return target.overloadpacket.__name__
    return ""


def rule_for(target: Target) -> Rule | None:
    """The operator's rule, by its name or because each of its results depends on one place alone."""
    found = _BY_NAME.get(name_of(target))
    if found is None and isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags:
        return pointwise.pointwise
    return found
