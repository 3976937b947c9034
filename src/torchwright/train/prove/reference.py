"""The same steps on one process, written down as plainly as they can be: none of the trainer's own code but the model.

Whole batches, no micro-batches, no recomputation, no compiler; AdamW as in its paper.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional as F

from torchwright.models.decoder.config import DecoderConfig
from torchwright.train.data.batch import WindowBatch, of_windows
from torchwright.train.model import Transformer, explicit_attention
from torchwright.train.model.fill import fill
from torchwright.train.model.vocabulary import IGNORE
from torchwright.train.prove.balancing import PlainBalancing
from torchwright.train.prove.shrink import STEPS
from torchwright.train.prove.trace import Recorder, Trace
from torchwright.train.run.config.run import Run
from torchwright.train.run.config.schedule import plan_step
from torchwright.train.run.objectives.balancing import balanced
from torchwright.train.run.objectives.optimizer import Optimizers
from torchwright.train.run.objectives.precision import autocast, convert

LENGTHS = (16, 5, 13, 16, 3, 16, 9, 14)
"""Sixteenths of a row that are tokens, row by row: no two processes hold the same number of labels."""


BEGINS = ((0, 5, 6, 11), (0,), (0, 3, 14), (0, 8))
"""Sixteenths of a row at which its documents begin, row by row, where a run has several."""
IN_DOCUMENTS = ("chat", "completion")
"""Forms of data that are packed where the run does not say so."""


class TokenRows:
    """Numbered rows of random tokens; behind a row's end there is `IGNORE`."""

    def __init__(self, run: Run, config: DecoderConfig) -> None:
        self.context, self.vocabulary = run.context, config.vocabulary
        self.packed = run.data.packing == "documents" or run.data.form in IN_DOCUMENTS

    def batch(self, first: int, rows: int) -> WindowBatch:
        """See `Windows.batch`."""
        batch = of_windows(torch.stack([self._row(first + place) for place in range(rows)]))
        if not self.packed:
            return batch
        documents_BT = torch.stack([self._documents(first + place) for place in range(rows)])
        ends_BT = documents_BT.diff(dim=1, append=documents_BT[:, -1:]) != 0
        return replace(
            batch, labels_BT=batch.labels_BT.masked_fill(ends_BT, IGNORE), documents_BT=documents_BT
        )

    def _documents(self, number: int) -> torch.Tensor:
        """(T,): where each token's document begins."""
        begins = torch.tensor(BEGINS[number % len(BEGINS)]) * self.context // 16
        places = torch.arange(self.context)
        return begins[torch.bucketize(places, begins, right=True) - 1]

    def _row(self, number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 + number)
        row = torch.randint(0, self.vocabulary, (self.context + 1,), generator=generator)
        row[1 + LENGTHS[number % len(LENGTHS)] * self.context // 16 :] = IGNORE
        return row


def fill_weights(model: Transformer) -> None:
    """Weights that make every part of the model matter: no norm is the identity, no bias zero."""
    for name, parameter in model.named_parameters():
        # By name: a pipeline's process has some of them.
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1:
            centre = 1 - model.config.norm_offset if name.endswith("weight") else 0.0
            fill(parameter, (centre + 0.2 * noise).to(parameter.dtype))
        else:
            fill(parameter, (noise / parameter.shape[-1] ** 0.5).to(parameter.dtype))


def reference(run: Run, config: DecoderConfig, dtype: torch.dtype) -> Trace:
    """The run's steps in `dtype`; where the run rounds, with that rounding."""
    model = Transformer(config if run.experts is None else balanced(config, run.experts)).to(dtype)
    convert(model, run.precision, "cpu")
    if run.qat is not None:
        from torchwright.train.run.objectives.qat import fake_quantize

        fake_quantize(model, run.qat)
    model.use_attention(explicit_attention)
    fill_weights(model)
    move, balancing = _mover(model, run), PlainBalancing(model, run)
    trace, rows = Trace(), TokenRows(run, config)
    for number in range(STEPS):
        step = plan_step(run, number)
        batch = rows.batch(step.first, step.rows)
        ids_BT, labels_BT, positions_BT = batch.ids_BT, batch.labels_BT, None
        if batch.documents_BT is not None:
            positions_BT = torch.arange(run.context) - batch.documents_BT
        recorder = Recorder(model, trace) if number == 0 else None
        with autocast(run.precision, "cpu"):
            logits_BTV = model(ids_BT, positions_BT, batch.documents_BT)
        wide = logits_BTV.to(torch.promote_types(logits_BTV.dtype, torch.float32)).flatten(0, 1)
        nll_N = F.cross_entropy(wide, labels_BT.flatten(), ignore_index=IGNORE, reduction="none")
        loss = nll_N.sum() / (labels_BT != IGNORE).sum()
        (loss + balancing.loss()).backward()
        parameters = dict(model.named_parameters())
        norm = torch.stack([_gradient(p).norm() for p in parameters.values()]).norm()
        if recorder is not None:
            recorder.stop()
            trace.nll_BT = nll_N.detach().view_as(labels_BT)
            trace.add("ids", ids_BT)
            trace.add("labels", labels_BT)
            if positions_BT is not None:
                trace.add("positions", positions_BT)
            for name, parameter in parameters.items():
                trace.add(f"gradient/{name}", _gradient(parameter))
            for name, load_X in balancing.loads().items():
                trace.add(f"load/{name}", load_X)
        trace.add(numbered("loss", number), loss)
        trace.add(numbered("norm", number), norm)
        if number and run.clip is not None:
            for parameter in parameters.values():
                _gradient(parameter).mul_((run.clip / (norm + 1e-6)).clamp(max=1.0))
        balancing.move()
        move(step.rate)
        model.zero_grad()
    for name, parameter in model.named_parameters():
        trace.add(f"parameter/{name}", parameter)
    for name, mixture in balancing.mixtures.items():
        if mixture.bias is not None:
            trace.add(f"bias/{name}", mixture.bias)
    return trace


def numbered(name: str, number: int) -> str:
    """The name of a step's figure in a trace."""
    return f"{name}/{number + 1}" if number else name


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _mover(model: Transformer, run: Run) -> Callable[[float], None]:
    """A step of the run's optimizer at a factor on its peak rate."""
    chosen = run.optimizer
    if chosen.name != "adamw":
        # Muon and 8-bit moments are third-party code, called as on one process.
        return Optimizers(model, chosen, compiled=False).step
    moments: dict[str, Any] = {}
    (beta1, beta2), taken = chosen.betas, 0

    @torch.no_grad()
    def step(rate: float) -> None:
        nonlocal taken
        taken += 1
        for name, p in model.named_parameters():
            g = _gradient(p)
            m, v = moments.get(name, (torch.zeros_like(p), torch.zeros_like(p)))
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            moments[name] = m, v
            if p.ndim >= 2 and not name.endswith("bias"):
                p.mul_(1 - rate * chosen.lr * chosen.weight_decay)
            scale = (v / (1 - beta2**taken)).sqrt() + chosen.eps
            p.sub_(rate * chosen.lr * m / (1 - beta1**taken) / scale)

    return step
