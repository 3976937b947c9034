"""Tensor parallelism with sequence parallelism: matrices and heads divided, and between blocks the tokens.

Column-wise, then row-wise matrices (Shoeybi et al., 2019); between them each process keeps T/tp tokens of the residual
stream (Korthikanti et al., 2022). Embedding and output layer are divided over the vocabulary, logits stay so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed._functional_collectives import wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from torchwright.models.decoder.config import DecoderConfig
from torchwright.train.model.attention import Attend, Scores
from torchwright.train.model.blocks import Attention, MixtureOfExperts, RMSNorm
from torchwright.train.model.latent import LatentAttention
from torchwright.train.model.layer_inputs import InputLayer
from torchwright.train.model.recurrent import ParallelMixer, RecurrentMixer
from torchwright.train.model.transformer import Layer, Transformer
from torchwright.train.parallel.mixers import mixer_plan
from torchwright.train.parallel.stages import Elsewhere

TOKENS, FEATURES, HEADS = Shard(1), Shard(-1), 2
NORMS = ("pre_attention", "post_attention", "pre_mlp", "post_mlp")


def apply_tensor_parallel(model: Transformer, mesh: DeviceMesh) -> None:
    """Divide the model over `mesh`; its experts are left to `experts.py`.

    `hidden` then gives a replicated DTensor of all tokens, `logits` one divided over the vocabulary.
    """
    if not isinstance(model.embedding, Elsewhere):
        style = RowwiseParallel(input_layouts=Replicate(), output_layouts=TOKENS)
        parallelize_module(model.embedding, mesh, style)
        model.embedding.register_forward_hook(_arrived)
    if not isinstance(model.head, Elsewhere):
        style = ColwiseParallel(input_layouts=Replicate(), output_layouts=FEATURES, use_local_output=False)
        parallelize_module(model, mesh, {"norm": SequenceParallel(), "head": style})
        # A DTensor, because the gradients of the output layer's calls are partial sums: a chunked loss adds them up as
        # such, and they are summed over processes once.
        gather = PrepareModuleOutput(
            output_layouts=TOKENS, desired_output_layouts=Replicate(), use_local_output=False
        )
        parallelize_module(model.norm, mesh, gather)
    model.tie()
    if model.inputs is not None:
        table = RowwiseParallel(input_layouts=Replicate(), output_layouts=TOKENS)
        own = SequenceParallel(use_local_output=True)
        parallelize_module(model.inputs, mesh, {"table": table, "project": own, "norm": own})
        model.inputs.table.register_forward_hook(_arrived)
    shared = shares_heads(model.config, mesh.size())
    for layer in model.layers:
        if isinstance(layer, InputLayer):
            parallelize_module(layer, mesh, _input_layer_plan(layer))
        if isinstance(layer, Layer):
            parallelize_module(layer, mesh, _layer_plan(layer, shared))


def shares_heads(config: DecoderConfig, ways: int) -> bool:
    """Check whether there are fewer key-value heads than processes, so that several attend to the same one."""
    return config.expanded_kv_heads % ways != 0


def share_heads(model: Transformer, mesh: DeviceMesh) -> None:
    """Let attention of each process see the key-value head of its queries alone, of those that all processes compute.

    To be called after `apply_context_parallel`, whose processes pass on what a process has after this.
    """
    for module in model.modules():
        if isinstance(module, Attention):
            module.attend = OwnHead(mesh, module.attend)


def _arrived(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """The embedding's output once it is here: a compiled layer gives none that is on its way a gradient.

    (pytorch#191113.)
    """
    return wait_tensor(output)


def _layer_plan(layer: Layer, shared: bool) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {
        part: SequenceParallel(use_local_output=True) for part in NORMS if getattr(layer, part) is not None
    }
    plan |= _mixing_plan("attention", layer.attention, shared)
    if isinstance(layer.mlp, MixtureOfExperts):
        return plan | _mixture_plan(layer.mlp)
    return plan | _dense_plan()


def _dense_plan() -> dict[str, ParallelStyle]:
    return {
        "mlp": PrepareModuleInput(input_layouts=TOKENS, desired_input_layouts=Replicate()),
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=TOKENS),
    }


def _mixing_plan(block: str, attention: nn.Module, shared: bool) -> dict[str, ParallelStyle]:
    """Return the styles of a layer's token mixer, called `block`."""
    if isinstance(attention, ParallelMixer):
        styles = Whole(Replicate()), GradientSummed()
        mixer = mixer_plan(f"{block}.mixer", attention.mixer, *styles)
        return mixer | _mixing_plan(f"{block}.attention", attention.attention, shared)
    if isinstance(attention, RecurrentMixer):
        return mixer_plan(block, attention, Whole(Replicate()), GradientSummed())
    plan: dict[str, ParallelStyle] = {
        block: PrepareModuleInput(
            input_layouts=(TOKENS, None, None),
            desired_input_layouts=(Replicate(), None, None),
            use_local_output=isinstance(attention, LatentAttention) or shared,
        ),
        f"{block}.o": RowwiseParallel(output_layouts=TOKENS),
    }
    if isinstance(attention, LatentAttention):
        return plan | _latent_plan(attention)
    assert isinstance(attention, Attention)
    parts = _shared_heads_plan(attention) if shared else _heads_plan(attention)
    parts |= {} if attention.sinks is None else {"sinks": Vectors(Shard(0))}
    return plan | {f"{block}.{part}": style for part, style in parts.items()}


def _input_layer_plan(layer: InputLayer) -> dict[str, ParallelStyle]:
    """Heads and features are divided; each process computes the layer's own inputs of its tokens."""
    own_tokens = SequenceParallel(use_local_output=True)
    by_head = SequenceParallel(sequence_dim=HEADS, use_local_output=True)
    plan: dict[str, ParallelStyle] = {
        name: own_tokens for name, part in layer.named_children() if isinstance(part, RMSNorm)
    }
    plan |= {
        "attention": PrepareModuleInput(
            input_layouts=(TOKENS, None, None, None, None),
            desired_input_layouts=(Replicate(), None, None, None, None),
        ),
        "attention.q": ColwiseParallel(),
        "attention.q_norm": by_head,
        "attention.o": RowwiseParallel(output_layouts=TOKENS),
        **_dense_plan(),
    }
    if layer.keys_values is not None:
        plan |= {
            "keys_values": PrepareModuleInput(
                input_layouts=(TOKENS, None), desired_input_layouts=(Replicate(), None)
            ),
            "keys_values.k": ColwiseParallel(),
            "keys_values.k_norm": by_head,
        }
        plan |= {} if layer.keys_values.v is None else {"keys_values.v": ColwiseParallel()}
    if layer.own_input is not None:
        plan |= {"own_input.gate": own_tokens, "own_input.down": own_tokens}
    if layer.mixture is not None:
        plan |= {
            "mixture": TokensGathered(2),
            "mixture.router": Whole(Replicate()),
            "mixture.scale": Vectors(Replicate()),
        }
    return plan


def _heads_plan(attention: Attention) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {part: ColwiseParallel() for part in ("q", "k", "v")}
    if attention.gate is not None:
        plan["gate"] = ColwiseParallel()
    kind = attention.norm_kind
    if kind != "none":
        by_head = SequenceParallel(sequence_dim=HEADS, use_local_output=True)
        style = Whole(FEATURES) if kind == "projection" else by_head
        plan |= {"q_norm": style, "k_norm": style}
    return plan


def _shared_heads_plan(attention: Attention) -> dict[str, ParallelStyle]:
    """Queries are divided; the few keys and values are computed whole by every process (`OwnHead`)."""
    whole = ["k", "v"]
    plan: dict[str, ParallelStyle] = {"q": ColwiseParallel()}
    if attention.gate is not None:
        plan["gate"] = ColwiseParallel()
    if attention.norm_kind != "none":
        whole.append("k_norm")
        plan["q_norm"] = SequenceParallel(sequence_dim=HEADS, use_local_output=True)
    return plan | {part: Whole(Replicate()) for part in whole}


def _latent_plan(attention: LatentAttention) -> dict[str, ParallelStyle]:
    """Only what is made by heads is divided: the latent vectors are few numbers, and every process has them whole."""
    whole = ["latent", "latent_norm"]
    if attention.query_in is not None:
        whole += ["query_in", "query_norm"]
    plan: dict[str, ParallelStyle] = {f"attention.{part}": Whole(Replicate()) for part in whole}
    return plan | {
        "attention.shared": GradientSummed(),
        "attention.query": ColwiseParallel(),
        "attention.from_latent": ColwiseParallel(),
    }


def _mixture_plan(mixture: MixtureOfExperts) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {"mlp": TokensGathered(), "mlp.router": Whole(Replicate())}
    if mixture.shared is not None:
        plan |= {
            "mlp.shared.gate": ColwiseParallel(),
            "mlp.shared.up": ColwiseParallel(),
            "mlp.shared.down": RowwiseParallel(output_layouts=Replicate()),
        }
    if mixture.shared_gate is not None:
        plan |= {"mlp.shared_gate": Whole(Replicate())}
    return plan


class Whole(ParallelStyle):
    """A module that every process computes on whole tensors, between neighbours that hold `layout`.

    Its parameters become replicated DTensors, so that all parameters lie on one mesh.
    """

    def __init__(self, layout: Placement) -> None:
        self.layout = layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(
            module,
            device_mesh,
            None,
            self._enter,  # pyright: ignore[reportArgumentType]  # its annotation says None; it takes what is returned
            self._leave,  # pyright: ignore[reportArgumentType]
        )

    def _enter(self, _module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> DTensor:
        (x,) = inputs
        return DTensor.from_local(x, mesh, [self.layout], run_check=False).redistribute(
            placements=[Replicate()]
        )

    def _leave(self, _module: nn.Module, output: DTensor, _mesh: DeviceMesh) -> torch.Tensor:
        return output.redistribute(placements=[self.layout]).to_local()


class Vectors(ParallelStyle):
    """A `Vector`, of which each process has its part or all."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def divide(_name: str, module: nn.Module, mesh: DeviceMesh) -> None:
            for name, parameter in list(module.named_parameters(recurse=False)):
                # Every process holds the same weights already (or none, on the meta device): nothing is sent.
                local = distribute_tensor(parameter, mesh, [self.placement], src_data_rank=None)
                module.register_parameter(name, nn.Parameter(local))

        distribute_module(module, device_mesh, divide)
        module.register_forward_hook(lambda _module, _inputs, output: output.to_local())
        return module


class GradientSummed(ParallelStyle):
    """An identity from whole tensors to each process's own heads; backward, what these give is added up."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def summed(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
            return gradient_summed(output, device_mesh)

        module.register_forward_hook(summed)
        return module


def gradient_summed(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return `x`, which all processes have whole, and of which each gives the gradient from its own use."""
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


class OwnHead:
    """Attention of a process's queries to their own key-value head, of all heads that every process has."""

    def __init__(self, mesh: DeviceMesh, attend: Attend) -> None:
        self.mesh, self.attend = mesh, attend

    def __call__(
        self,
        q_BHTD: torch.Tensor,
        k_BKTD: torch.Tensor,
        v_BKTD: torch.Tensor,
        scores: Scores,
        documents_BS: torch.Tensor | None = None,
    ) -> torch.Tensor:
        own = self.mesh.get_local_rank() * k_BKTD.shape[1] // self.mesh.size()
        k, v = (gradient_summed(part, self.mesh)[:, own : own + 1] for part in (k_BKTD, v_BKTD))
        return self.attend(q_BHTD, k, v, scores, documents_BS)


class TokensGathered(ParallelStyle):
    """A block that takes and gives whole local tensors, inside a stream of divided tokens."""

    def __init__(self, inputs: int = 1) -> None:
        self.inputs = inputs

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        before = PrepareModuleInput(
            input_layouts=(TOKENS,) * self.inputs,
            desired_input_layouts=(Replicate(),) * self.inputs,
            use_local_output=True,
        )
        behind = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=TOKENS)
        return parallelize_module(parallelize_module(module, device_mesh, before), device_mesh, behind)
