"""A layout applied to a model in place: tensor, expert and context parallelism, then sharding."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard

from torchwright.models.decoder.config import DecoderConfig
from torchwright.models.decoder.tensor_parallel.shape import check_counts, check_kv_heads, divided_counts
from torchwright.train.layout import Layout, LayoutError
from torchwright.train.model.blocks import MixtureOfExperts
from torchwright.train.model.transformer import Transformer
from torchwright.train.parallel.context import apply_context_parallel
from torchwright.train.parallel.dispatch import TransportKind, make_transport
from torchwright.train.parallel.experts import apply_expert_parallel
from torchwright.train.parallel.mesh import experts_shard_mesh, make_experts_mesh, shard_mesh
from torchwright.train.parallel.mixers import check_mixer
from torchwright.train.parallel.stages import Staged
from torchwright.train.parallel.tensor import apply_tensor_parallel, share_heads, shares_heads


def parallelize(
    model: Transformer,
    layout: Layout,
    mesh: DeviceMesh,
    *,
    compute: torch.dtype | None = None,
    reshard_after_forward: bool = True,
    dispatch: TransportKind = "all_to_all",
) -> None:
    """Apply the layout's axes to `model` in place; `mesh` is `make_mesh`'s.

    The model may be on the meta device: fill it afterwards (`to_empty`, then `load_weights` or `reset_parameters`).
    Else every process must hold the same weights. Gradients are sums over all processes, not means: divide the loss by
    the global number of labels. Layers are gathered and computed with as `compute` (None: as they are), and gradients
    summed in float32 or better; a layout of one process computes with parameters as they are. With
    `reshard_after_forward=False` layers keep their gathered parameters until the backward pass. `dispatch` is how
    tokens travel to experts in other processes (`dispatch.py`).

    Raises `LayoutError` for a layout that the model's shape does not allow, and a `dispatch` that is not to be had.
    """
    check_fits(model.config, layout, len(model.stages) if isinstance(model, Staged) else 1)
    if layout.tp > 1:
        apply_tensor_parallel(model, mesh["tp"])
    experts = [module.experts for module in model.modules() if isinstance(module, MixtureOfExperts)]
    # Without ep experts lie on the mesh of all others.
    experts_mesh = make_experts_mesh(layout, mesh.device_type) if experts and layout.ep > 1 else mesh
    transport = None
    if experts and layout.ep > 1:
        group, width = experts_mesh.get_group("ep"), model.config.model
        transport = make_transport(dispatch, group, len(experts[0].gate), width, mesh.device_type)
    for block in experts:
        apply_expert_parallel(block, experts_mesh, transport)
    if layout.cp > 1:
        apply_context_parallel(model, mesh["cp"], model.config.kv_heads_of(layout.tp))
    if shares_heads(model.config, layout.tp):
        share_heads(model, mesh["tp"])

    if layout.processes == 1:
        return
    # With tp alone there is one process to shard over; FSDP still sums what tp's processes have of a norm's gradient,
    # and computes in the precision asked for.
    policy = MixedPrecisionPolicy(
        param_dtype=compute, reduce_dtype=compute and torch.float32, cast_forward_inputs=False
    )
    part = shard_mesh(mesh, layout)
    for block in experts:
        fully_shard(
            block,
            mesh=part if experts_mesh is mesh else experts_shard_mesh(experts_mesh, layout),
            mp_policy=policy,
            # A stage's parameters stay gathered for all its micro-batches.
            reshard_after_forward=reshard_after_forward and layout.pp == 1,
            shard_placement_fn=_expert_placement(layout),
        )
    if isinstance(model, Staged):
        _shard_stages(model, part, policy)
        return
    for layer in model.layers:
        fully_shard(layer, mesh=part, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    tied = model.head.weight is model.embedding.weight
    if compute is not None:
        _keep_embedding_wide(model.embedding, compute)
        if not tied:
            fully_shard(model.embedding, mesh=part, reshard_after_forward=False)
        if model.inputs is not None:
            _keep_embedding_wide(model.inputs.table, compute)
            fully_shard(model.inputs.table, mesh=part, reshard_after_forward=False)
    fully_shard(model, mesh=part, mp_policy=MixedPrecisionPolicy() if tied else policy)
    for method in ("loss", "hidden"):
        register_fsdp_forward_method(model, method)
    sum_gradients(model)


def _shard_stages(model: Staged, part: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """Each stage of this process is a root of its own, and stays gathered for all its micro-batches."""
    compute = policy.param_dtype
    if compute is not None:
        model.activation = compute
    for stage in model.stages.values():
        for layer in stage.layers:
            fully_shard(layer, mesh=part, mp_policy=policy, reshard_after_forward=False)
        if stage.first and compute is not None:
            _keep_embedding_wide(model.embedding, compute)
            fully_shard(model.embedding, mesh=part, reshard_after_forward=False)
        fully_shard(stage, mesh=part, mp_policy=policy, reshard_after_forward=False)
        sum_gradients(stage)


def _keep_embedding_wide(embedding: nn.Embedding, compute: torch.dtype) -> None:
    """The table stays as it is, and what it gives is rounded.

    A row of its gradient is a sum over all places of a token, of which bfloat16 keeps the first 256.
    """
    embedding.register_forward_hook(lambda _module, _inputs, x_BTE: x_BTE.to(compute))


def sum_gradients(model: nn.Module) -> None:
    """Tell FSDP to add gradients up: the loss is divided by the global number of labels already.

    Said in plain sums, because gloo has no premultiplied ones, and its averages once were sums.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def check_fits(config: DecoderConfig, layout: Layout, pieces: int = 1) -> None:
    """Raise `LayoutError` for the first degree that the model's shape does not allow; a process has `pieces` stages."""
    if layout.pp > 1 and layout.pp * pieces > config.layers:
        raise LayoutError(
            f"the layout has pp={layout.pp} with {pieces} stages a process, more stages than the model has layers",
            found=f"{config.layers} layers for {layout.pp * pieces} stages",
            next="choose a smaller pp, or fewer stages a process",
        )
    if layout.pp > 1 and config.tied:
        raise LayoutError(
            f"the layout has pp={layout.pp}, and the model's output layer is its embedding",
            found="tied embeddings, of which the first stage and the last would each need the whole",
            allowed="pp=1, or a model with an output layer of its own",
            next="use dp_shard or tp in its place",
        )
    if config.layer_inputs is not None:
        _check_layer_inputs(config, layout)
    if layout.ep > 1 and config.experts is None:
        raise LayoutError(
            f"the layout has ep={layout.ep}, and the model has no experts",
            allowed="ep=1",
            next="use dp_shard in its place",
        )
    check_mixer(config, layout)
    heads = config.expanded_kv_heads
    check_kv_heads(heads, layout.tp, LayoutError)
    if heads % layout.tp and config.qk_norm == "projection":
        raise LayoutError(
            f"tp={layout.tp} is more than the model's key-value heads, whose keys are normed all together",
            found=f"{heads} key-value heads",
            allowed=f"divisors of {heads}",
            next="choose another tp",
        )
    check_counts(divided_counts(config), "tp", layout.tp, LayoutError)
    if config.experts is not None:
        check_counts({"experts": config.experts.count}, "ep", layout.ep, LayoutError)


def _check_layer_inputs(config: DecoderConfig, layout: Layout) -> None:
    """Raise `LayoutError` for what does not divide layers that read inputs of their own and keys of earlier ones."""
    heads = config.expanded_kv_heads
    for axis, refused, why, allowed in (
        (
            "pp",
            layout.pp > 1,
            "stages pass on the residual stream alone, without those keys and inputs",
            "pp=1",
        ),
        ("tp", heads % layout.tp > 0, f"key-value heads in multiples of {heads}", f"a divisor of {heads}"),
    ):
        if refused:
            raise LayoutError(
                f"the layout has {axis}={getattr(layout, axis)}, which does not divide {config.architecture}: "
                "its layers read inputs of their own, and some the keys of earlier ones",
                found=why,
                allowed=allowed,
                next="use dp_shard or cp in its place",
            )


def _expert_placement(layout: Layout) -> Callable[[nn.Parameter], Shard | None]:
    """Return the dimension in which FSDP shards the experts' matrices: between experts while there are enough, else
    the model size.
    """
    ways = layout.dp_shard * layout.cp // layout.ep

    def place(parameter: nn.Parameter) -> Shard | None:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if local.shape[0] % ways == 0 and not _divided(parameter, 0):
            return Shard(0)
        for dim in reversed(range(1, local.ndim)):
            if local.shape[dim] % ways == 0 and not _divided(parameter, dim):
                return Shard(dim)
        return None

    return place


def _divided(parameter: torch.Tensor, dim: int) -> bool:
    return isinstance(parameter, DTensor) and any(
        placement.is_shard(dim) for placement in parameter.placements
    )
