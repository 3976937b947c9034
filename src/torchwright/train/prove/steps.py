"""The trainer's own steps on the small run, with every value that a comparison needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchwright.train.model import Transformer
from torchwright.train.model.blocks import MixtureOfExperts
from torchwright.train.model.fill import whole
from torchwright.train.parallel.batch import own_tokens
from torchwright.train.parallel.stages import Staged
from torchwright.train.prove.reference import TokenRows, fill_weights, numbered
from torchwright.train.prove.shrink import STEPS, Small
from torchwright.train.prove.trace import Recorder, Trace
from torchwright.train.run.config.schedule import plan_step
from torchwright.train.run.objectives.learner import LanguageLearner


def train_steps(small: Small, dtype: torch.dtype) -> tuple[Trace, DeviceMesh]:
    """This process's part of the run's steps, its weights in `dtype`, in an initialized process group."""
    run, trace = small.run, Trace()
    with _weights_in(dtype):
        learner = LanguageLearner(run, small.config, Path(), "cpu")
    assert isinstance(learner.model, Transformer)
    fill_weights(learner.model)
    rows = TokenRows(run, small.config)
    for number in range(STEPS):
        step = plan_step(run, number)
        batches = learner.batches.of_step(step, rows)
        # Compiled code is left as it is; where something in it is wrong, the same is looked at without the compiler.
        recorder = None if number or run.compile else Recorder(learner.model, trace)
        learner.clip = (
            run.clip if number else None
        )  # the gradients of the first step are compared as they are
        if not number:
            trace.positions = batches[0].positions_BT
            if rows.packed:  # positions are those within documents
                trace.positions = own_tokens(run.context, run.parallel, learner.mesh)
            for batch in batches:
                trace.add("ids", batch.ids_BT)
                trace.add("labels", batch.labels_BT)
                if rows.packed and batch.positions_BT is not None:
                    trace.add("positions", batch.positions_BT)
        figures = learner.gradients(batches)
        if recorder is not None:
            recorder.stop()
        if not number:
            for name, parameter in reversed(list(learner.model.named_parameters())):
                trace.add(
                    f"gradient/{name}", torch.empty(0) if parameter.grad is None else whole(parameter.grad)
                )
            for name, load_X in _loads(learner).items():
                trace.add(f"load/{name}", load_X)
        trace.add(numbered("loss", number), torch.tensor(figures.loss, dtype=torch.float64))
        trace.add(numbered("norm", number), torch.tensor(figures.grad_norm, dtype=torch.float64))
        learner.update(step)
    for name, parameter in learner.model.named_parameters():
        trace.add(f"parameter/{name}", whole(parameter))
    for name, mixture in learner.model.named_modules():
        if isinstance(mixture, MixtureOfExperts) and mixture.bias is not None:
            trace.add(f"bias/{name}", mixture.bias)
    if isinstance(learner.model, Staged):
        traces: list[Trace] = [trace] * dist.get_world_size(learner.model.group)
        dist.all_gather_object(traces, trace, group=learner.model.group)
        trace.merge(traces)
    trace.values = {name: trace.values[name] for name in sorted(trace.values, key=_turn)}
    return trace, learner.mesh


def _loads(learner: LanguageLearner) -> dict[str, torch.Tensor]:
    """Mixture → the step's choices of each expert, of all processes."""
    if learner.balancing is None:
        return {}
    return dict(zip(learner.balancing.names, learner.balancing.load_LX, strict=True))


def _turn(name: str) -> int:
    """Return a value's position among the others: a loss is reported when its gradients exist already."""
    first = ("ids", "labels", "positions", "forward", "loss")
    kind, _, rest = name.partition("/")
    return first.index(kind) if kind in first and not (kind == "loss" and rest) else len(first)


@contextmanager
def _weights_in(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
