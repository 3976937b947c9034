"""Three training steps, alone or as one process of a layout, with every value that a comparison needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from torchwright.decoder.config import DecoderConfig
from torchwright.train.layout import Layout
from torchwright.train.loss import IGNORE, shift_labels
from torchwright.train.model import Transformer
from torchwright.train.model.fill import fill, whole
from torchwright.train.model.transformer import Layer
from torchwright.train.parallel import (
    by_mesh,
    clip_grad_norm,
    global_sum,
    local_batch,
    make_mesh,
    parallelize,
)
from torchwright.train.prove.shrink import ROWS, TOKENS

STEPS = 3
CHUNK = 3
"""Tokens of a chunk of the first step's loss: no divisor of any part of a sequence."""
CLIP = 0.5


@dataclass
class Trace:
    """A run's values in the order in which steps compute them.

    forward/NAME, labels, loss, backward/NAME, gradient/NAME and norm of the first step, loss/N and norm/N of those
    after it, parameter/NAME in the end. What is sharded is whole here; of activations and their gradients there is this
    process's part.
    """

    values: dict[str, torch.Tensor] = field(default_factory=dict)
    nll_BT: torch.Tensor | None = None
    """The first step's loss token by token, of the run with one process alone."""

    def add(self, name: str, value: torch.Tensor) -> None:
        self.values[name] = value.detach().clone()


def global_batch(config: DecoderConfig, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and shifted labels (ROWS, TOKENS): rows of different lengths, and ignored labels in some of them.

    Parts of the batch hold different numbers of labels along every axis, so that a mean of means shows.
    """
    generator = torch.Generator().manual_seed(1000 + step)
    ids_BT = torch.randint(0, config.vocabulary, (ROWS, TOKENS), generator=generator)
    lengths_B = torch.tensor([16, 5, 13, 16, 3, 16, 9, 14])
    ids_BT.masked_fill_(torch.arange(TOKENS) >= lengths_B[:, None], 0)
    labels_BT = shift_labels(ids_BT, lengths_B)
    labels_BT[3, :6] = IGNORE
    labels_BT[5, 2:11:2] = IGNORE
    return ids_BT, labels_BT


def build(config: DecoderConfig, dtype: torch.dtype) -> Transformer:
    """The model with weights that make every part of it matter: no norm is the identity, no bias zero."""
    model = Transformer(config).to(dtype)
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
        if parameter.ndim == 1:
            centre = 1 - config.norm_offset if name.endswith("weight") else 0.0
            fill(parameter, centre + 0.2 * noise)
        else:
            fill(parameter, noise / parameter.shape[-1] ** 0.5)
    return model


def run_alone(config: DecoderConfig, dtype: torch.dtype) -> Trace:
    """The reference: one process, the whole batch."""
    model = build(config, dtype)
    ids, labels = global_batch(config, 0)
    with torch.no_grad():
        nll = F.cross_entropy(
            model(ids).flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="none"
        )
    trace = _run(model, config, None, None)
    trace.nll_BT = nll.view_as(labels)
    return trace


def run_in_layout(config: DecoderConfig, dtype: torch.dtype, layout: Layout) -> tuple[Trace, DeviceMesh]:
    """This process's part of the same steps, in an initialized process group."""
    mesh = make_mesh(layout, "cpu")
    model = build(config, dtype)
    parallelize(model, layout, mesh)
    return _run(model, config, layout, mesh), mesh


def _run(model: Transformer, config: DecoderConfig, layout: Layout | None, mesh: DeviceMesh | None) -> Trace:
    trace = Trace()
    groups = [{"params": group} for group in by_mesh(model.parameters())]
    # A large eps: gradients that are zero but for rounding must not become steps of full size.
    optimizer = torch.optim.AdamW(groups, lr=0.005, eps=1e-4, weight_decay=0.1)
    for step in range(STEPS):
        ids, labels = global_batch(config, step)
        positions = None
        if layout is not None and mesh is not None:
            ids, labels, positions = local_batch(ids, labels, layout, mesh)
        hooks = _record(model, trace) if step == 0 else []
        # One process computes the plain loss always: it is what a chunked one is compared with.
        chunk = CHUNK if step == 0 and mesh is not None else 0
        total, valid = model.loss(ids, labels, positions, chunk=chunk)
        everywhere = valid if mesh is None else global_sum(valid, mesh)
        if step == 0:
            trace.add("labels", everywhere)
        trace.add("loss" if step == 0 else f"loss/{step + 1}", reported_loss(total, everywhere, mesh))
        differentiated_loss(total, everywhere, mesh).backward()
        for hook in hooks:
            hook.remove()
        if step == 0:
            for name, parameter in reversed(list(model.named_parameters())):
                assert parameter.grad is not None, f"{name} has no gradient"
                trace.add(f"gradient/{name}", whole(parameter.grad))
        norm = clip_grad_norm(model.parameters(), CLIP)
        trace.add("norm" if step == 0 else f"norm/{step + 1}", norm)
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        trace.add(f"parameter/{name}", whole(parameter))
    return trace


def differentiated_loss(
    total: torch.Tensor, everywhere: torch.Tensor, _mesh: DeviceMesh | None
) -> torch.Tensor:
    """This process's part of the step's loss; the parts' gradients are summed."""
    return total / everywhere


def reported_loss(total: torch.Tensor, everywhere: torch.Tensor, mesh: DeviceMesh | None) -> torch.Tensor:
    """The step's loss as a log shows it."""
    return (total.detach() if mesh is None else global_sum(total, mesh)) / everywhere


def _record(model: Transformer, trace: Trace) -> list[torch.utils.hooks.RemovableHandle]:
    """Hooks that keep the blocks' outputs and, as they come, those outputs' gradients."""
    blocks: dict[str, nn.Module] = {"embedding": model.embedding}
    for place, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        blocks |= {f"layers.{place}.attention": layer.attention, f"layers.{place}.mlp": layer.mlp}
    blocks["norm"] = model.norm

    def keep(name: str, output: Any) -> None:
        trace.add(f"forward/{name}", whole(output))
        output.register_hook(lambda gradient: trace.add(f"backward/{name}", whole(gradient)))

    return [
        block.register_forward_hook(lambda _block, _inputs, output, name=name: keep(name, output))
        for name, block in blocks.items()
    ]
