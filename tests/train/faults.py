"""Faults seeded into the trainer's own code: what silent bugs of training look like, to see that a proof names them.

Each replaces one function of training code while the context lasts, in every process of a proof.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor, Replicate

from torchwright.train.model import Transformer
from torchwright.train.model.balance import BalancingLoss
from torchwright.train.model.loss import shift_labels
from torchwright.train.model.vocabulary import IGNORE
from torchwright.train.parallel import apply, experts, parallelize, ring
from torchwright.train.parallel.context import HeadExchange
from torchwright.train.parallel.stages import Stage
from torchwright.train.parallel.zigzag import places
from torchwright.train.run.objectives import learner, setup, step
from torchwright.train.run.objectives.balancing import Balancing
from torchwright.train.run.objectives.objective import NextToken, Objective
from torchwright.train.run.objectives.optimizer import Optimizers
from torchwright.train.run.objectives.setup import Batches

TRAIN = "torchwright.train"


@contextlib.contextmanager
def seeded(name: str) -> Iterator[None]:
    """The fault `name` in this process, and a compiler that is quick."""
    with FAULTS[name](), quick_compiler():
        yield


def quick_compiler() -> Any:
    """All of torch.compile but for the generated code, which takes a minute to build."""
    return patch.object(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


def _after(function: str, more: Callable[..., Any]) -> Any:
    """`function`, and `more` on the same arguments when it is done."""
    module, _, name = function.rpartition(".")
    real = getattr(__import__(module, fromlist=[name]), name)

    def both(*arguments: Any, **options: Any) -> Any:
        answer = real(*arguments, **options)
        more(*arguments)
        return answer

    return patch(function, both)


# Reductions


def _replicas_apart() -> Any:
    """HSDP whose copies never see each other's gradients."""

    return patch.object(_fsdp_collectives, "dist", _Silent())


class _Silent:
    """torch.distributed, in which nothing is summed over all."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_reduce(self, *_arguments: Any, **_options: Any) -> None:
        return None


class _Mislabelled(torch.autograd.Function):
    """Identity whose gradient is called replicated though it is a part of a sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (gradient,) = gradients
        assert isinstance(gradient, DTensor)
        return DTensor.from_local(gradient.to_local(), gradient.device_mesh, [Replicate()], run_check=False)


def _up_not_summed() -> Any:
    """Tensor parallelism that forgets to sum what `mlp.up` gives back."""

    def forget(model: Transformer, _mesh: Any) -> None:
        for layer in model.layers:
            layer.mlp.up.register_forward_pre_hook(lambda _, inputs: (_Mislabelled.apply(inputs[0]),))

    return _after(f"{TRAIN}.parallel.apply.apply_tensor_parallel", forget)


def _bias_before_sum() -> Any:
    """A row-wise product whose bias every process adds before the sum."""

    def early(model: Transformer, mesh: Any) -> None:
        def more(module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
            return output + (mesh.size() - 1) * module.bias.to_local()

        for layer in model.layers:
            layer.attention.o.register_forward_hook(more)

    return _after(f"{TRAIN}.parallel.apply.apply_tensor_parallel", early)


def _experts_doubled() -> Any:
    """pytorch#160285: experts' gradients, summed over ep already, are multiplied by it."""

    def double(block: Any, mesh: Any, _transport: Any) -> None:
        ways = mesh["ep"].size() if "ep" in mesh.mesh_dim_names else 1
        compute = block.compute

        def wrong(x_SE: torch.Tensor, counts_X: torch.Tensor, *rest: Any) -> torch.Tensor:
            gate, up, down = (matrix * ways - matrix.detach() * (ways - 1) for matrix in rest[:3])
            return compute(x_SE, counts_X, gate, up, down, rest[3])

        block.compute = wrong

    return _after(f"{TRAIN}.parallel.apply.apply_expert_parallel", double)


def _averaged() -> Any:
    """FSDP as it comes: gradients are means, of a loss that is a part of the mean already."""
    return patch.object(apply, "sum_gradients", lambda model: None)


@contextlib.contextmanager
def _average_sums() -> Iterator[None]:
    """pytorch#162338: a trainer relies on FSDP's mean, and gloo's reduce-scatter sums where AVG was asked for.

    Only float32 asks for it: in float64 FSDP divides sums by itself.
    """
    reduce_scatter = DefaultReduceScatter.__call__

    def sums(self: DefaultReduceScatter, op: Any, **rest: Any) -> Any:
        return reduce_scatter(self, op=dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op, **rest)

    def means(model: Transformer) -> None:
        """FSDP's own mean, and each gradient multiplied by the number of processes afterwards."""
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor)
            ways = parameter.device_mesh.size()
            parameter.register_post_accumulate_grad_hook(lambda p, ways=ways: p.grad.mul_(ways))

    with (
        patch(f"{TRAIN}.parallel.apply.sum_gradients", means),
        patch.object(DefaultReduceScatter, "__call__", sums),
    ):
        yield


def _gather_without_sum() -> Any:
    """pytorch#153016: an all-gather whose gradient is taken as whole, though each process has a part of the sum."""
    return patch.object(experts._CopyIn, "backward", staticmethod(lambda ctx, gradient: (gradient, None)))


def _norms_not_summed() -> Any:
    """Megatron-LM#1446: sequence parallelism, and norms' gradients stay as each process's own tokens made them."""
    return patch.object(FSDPParam, "_get_grad_inner_tensor", lambda _, gradient: gradient.to_local())


def _norm_of_own_shard() -> Any:
    """torchtune#2420: clipping by the norm of what a process holds itself."""

    def wrong(parameters: Any, _stages: int) -> torch.Tensor:
        gradients = [p.grad for p in parameters if p.grad is not None]
        own = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
        return torch.stack([gradient.norm() for gradient in own]).norm()

    return patch.object(step, "grad_norm", wrong)


# Batches


def _prepared(change: Callable[[Batches, step.MicroBatch], step.MicroBatch]) -> Any:
    real = Batches.prepare
    return patch.object(Batches, "prepare", lambda self, windows: change(self, real(self, windows)))


def _positions_begin_anew() -> Any:
    """Every part of a sequence is turned as if it were its beginning."""

    def anew(_self: Batches, batch: step.MicroBatch) -> step.MicroBatch:
        positions = torch.arange(batch.ids_BT.shape[1])
        return dataclasses.replace(batch, positions_BT=positions)

    return _prepared(anew)


def _labels_lost() -> Any:
    """DeepSpeed#8457: labels are shifted in each part of a sequence, so that its last token has none."""

    def late(_self: Batches, batch: step.MicroBatch) -> step.MicroBatch:
        if batch.positions_BT is None:
            return batch
        shifted = shift_labels(batch.ids_BT).masked_fill(batch.labels_BT == IGNORE, IGNORE)
        return dataclasses.replace(batch, labels_BT=shifted)

    return _prepared(late)


def _documents_in_parts() -> Any:
    """Where documents begin is said in the order in which processes hold the tokens, not in that of the row."""

    def in_parts(self: Batches, batch: step.MicroBatch) -> step.MicroBatch:
        assert batch.documents_BS is not None
        tokens, ways = batch.documents_BS.shape[1], self._layout.cp
        order = torch.cat([places(tokens, part, ways) for part in range(ways)])
        return dataclasses.replace(batch, documents_BS=batch.documents_BS[:, order])

    return _prepared(in_parts)


def _same_rows() -> Any:
    """Processes along dp_shard that all read the first part of the batch."""
    return patch.object(setup, "own_part_of_rows", lambda layout, mesh: 0)


def _mean_of_means() -> Any:
    """Each process divides by its own number of labels, and the means are averaged."""

    def own(objective: Objective, batches: Sequence[step.MicroBatch], copies: int) -> torch.Tensor:
        count = torch.stack([objective.count(batch) for batch in batches]).sum().double()
        return count * dist.get_world_size() / copies

    return patch.object(step, "counted_everywhere", own)


def _means_of_micro_batches() -> Any:
    """Each micro-batch is a mean of its own, however few labels it holds."""
    real = learner.gradients

    def wrong(
        model: Any, objective: NextToken, batches: Sequence[step.MicroBatch], *, copies: int, **rest: Any
    ) -> Any:
        everywhere = step.counted_everywhere(objective, batches, copies)
        shares = {
            id(batch): everywhere / (len(batches) * step.counted_everywhere(objective, [batch], copies))
            for batch in batches
        }

        class Weighed(NextToken):
            def __init__(self) -> None:
                self._loss = objective._loss

            def __call__(self, batch: step.MicroBatch) -> Any:
                nll, more = super().__call__(batch)
                return nll * shares[id(batch)].to(nll.dtype), more

        return real(model, Weighed(), batches, copies=copies, **rest)

    return patch.object(learner, "gradients", wrong)


# Experts


def _own_loads() -> Any:
    """Experts are kept even by the tokens of each process alone."""
    real = Balancing.__init__

    def wrong(self: Balancing, *arguments: Any, **options: Any) -> None:
        real(self, *arguments, **options)
        self._groups = []

    return patch.object(Balancing, "__init__", wrong)


def _balanced_apart() -> Any:
    """The balancing loss of each process's own tokens."""
    real = BalancingLoss.__init__

    def wrong(self: BalancingLoss, coefficient: float, micro_batches: int, _groups: Any) -> None:
        real(self, coefficient, micro_batches, [])

    return patch.object(BalancingLoss, "__init__", wrong)


# Pipeline stages


def _micro_batch_dropped() -> Any:
    """Every second micro-batch's gradient never arrives at the stage before."""
    real = Stage.forward
    passed: dict[int, int] = {}

    def wrong(self: Stage, x: torch.Tensor, **rows: torch.Tensor) -> torch.Tensor:
        passed[self.number] = passed.get(self.number, 0) + 1
        if not self.first and passed[self.number] % 2 == 0:
            x = _Dropped.apply(x)  # type: ignore[assignment]
        return real(self, x, **rows)

    return patch.object(Stage, "forward", wrong)


class _Dropped(torch.autograd.Function):
    """Identity whose gradient is nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(gradients[0])


# Attention


def _own_tokens_alone() -> Any:
    """Context parallelism whose mask hides the other processes' tokens."""

    def alone(
        self: HeadExchange, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Any, documents: Any
    ) -> torch.Tensor:
        return self.attend(q, k, v, scores, documents)

    return patch.object(HeadExchange, "__call__", alone)


@contextlib.contextmanager
def _ring_forgets() -> Iterator[None]:
    """A ring that loses the gradients of keys and values beyond its second hop."""
    blocks, backward, backwards = ring._Ring.blocks, ring._backward, []

    def fewer(self: ring._Ring, hop: int, *rest: Any) -> Any:
        return iter(()) if backwards and hop > 2 else blocks(self, hop, *rest)

    def through(*arguments: Any) -> Any:
        backwards.append(True)
        try:
            return backward(*arguments)
        finally:
            backwards.clear()

    with patch.object(ring._Ring, "blocks", fewer), patch.object(ring, "_backward", through):
        yield


# Recomputation, compilation, precision, optimizer


def _recomputed_otherwise() -> Any:
    """Recomputation that turns the other way."""
    real = step.checkpoint.checkpoint

    def wrong(function: Any, x: torch.Tensor, turn: Any, documents: Any, **options: Any) -> Any:
        calls: list[int] = []

        def again(x: torch.Tensor, turn: Any) -> torch.Tensor:
            calls.append(1)
            cos, sin = turn
            return function(x, (cos, -sin) if len(calls) > 1 else turn, documents)

        return real(again, x, turn, **options)

    return patch.object(step.checkpoint, "checkpoint", wrong)


def _compiled_embedding() -> Any:
    """pytorch#191113: what is on its way into a compiled layer gets no gradient."""
    return patch(f"{TRAIN}.parallel.tensor._arrived", lambda _module, _inputs, output: output)


@contextlib.contextmanager
def _not_rounded() -> Iterator[None]:
    """A precision that is written down and not applied."""
    with (
        patch.object(learner, "autocast", lambda precision, device: contextlib.nullcontext()),
        patch.object(setup, "parallelize", lambda model, layout, mesh, **_: parallelize(model, layout, mesh)),
    ):
        yield


def _after_update(change: Callable[[Optimizers], None]) -> Any:
    real = Optimizers.step

    def wrong(self: Optimizers, rate: float) -> None:
        real(self, rate)
        change(self)

    return patch.object(Optimizers, "step", wrong)


def _moments_rounded() -> Any:
    """Adam's second moments of sharded parameters, kept in bfloat16."""

    def rounded(self: Optimizers) -> None:
        for name, value in self.tensors().items():
            if name.endswith("exp_avg_sq") and isinstance(value, DTensor):
                value.to_local().copy_(value.to_local().bfloat16())

    return _after_update(rounded)


def _steps_counted_twice() -> Any:
    """Adam's step, counted by each of two processes for all."""

    def twice(self: Optimizers) -> None:
        for name, value in self.tensors().items():
            if name.endswith(".step"):
                value += dist.get_world_size() - 1

    return _after_update(twice)


FAULTS: dict[str, Callable[[], Any]] = {
    "none": contextlib.nullcontext,
    "replicas apart": _replicas_apart,
    "up not summed": _up_not_summed,
    "bias before sum": _bias_before_sum,
    "experts doubled": _experts_doubled,
    "averaged": _averaged,
    "average sums": _average_sums,
    "gather without sum": _gather_without_sum,
    "norms not summed": _norms_not_summed,
    "norm of own shard": _norm_of_own_shard,
    "positions begin anew": _positions_begin_anew,
    "labels lost": _labels_lost,
    "documents in parts": _documents_in_parts,
    "same rows": _same_rows,
    "mean of means": _mean_of_means,
    "means of micro-batches": _means_of_micro_batches,
    "own loads": _own_loads,
    "balanced apart": _balanced_apart,
    "micro-batch dropped": _micro_batch_dropped,
    "own tokens alone": _own_tokens_alone,
    "ring forgets": _ring_forgets,
    "recomputed otherwise": _recomputed_otherwise,
    "compiled embedding": _compiled_embedding,
    "not rounded": _not_rounded,
    "moments rounded": _moments_rounded,
    "steps counted twice": _steps_counted_twice,
}
