"""`[experts]` of a run: how full each expert was in a step, and what keeps them even."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchwright.models.decoder.config import DecoderConfig
from torchwright.train.model import Transformer
from torchwright.train.model.balance import BalancingLoss, Load
from torchwright.train.model.blocks import MixtureOfExperts
from torchwright.train.model.transformer import mixture_of
from torchwright.train.parallel.batch import LOSS_AXES
from torchwright.train.run.config.data_section import RunError
from torchwright.train.run.config.run import BIAS_RATE, Experts

FULLEST = "expert_load"
"""The figure: choices that fell on a layer's fullest expert over the mean of its experts, 1 where all are even."""


def balanced(config: DecoderConfig, chosen: Experts) -> DecoderConfig:
    """The model's shape with what `chosen` asks for; raises `RunError` where it has no experts."""
    if config.experts is None:
        raise RunError("[experts] is for experts, and the model has none", next="leave [experts] out")
    if chosen.balance != "bias":
        return config
    if config.layer_inputs is not None:
        raise RunError(
            f"experts.balance 'bias' moves biases that choose experts, and {config.architecture} has no place for them",
            next="give a coefficient as `balance`",
        )
    return replace(config, experts=replace(config.experts, bias=True))


class Balancing:
    """The load of a model's experts, step by step, and the loss or the bias that keeps it even.

    A bias b decides with the shares which experts a token goes to, and has no part in how they are weighted; after each
    step it moves by `bias_rate` · sign(mean load − load) (Wang et al., 2024; DeepSeek-AI, 2024).
    """

    def __init__(
        self, model: Transformer, chosen: Experts | None, micro_batches: int, mesh: DeviceMesh, device: str
    ) -> None:
        assert model.config.experts is not None
        self.rate = 0.0
        if chosen is not None and chosen.balance == "bias":
            self.rate = BIAS_RATE if chosen.bias_rate is None else chosen.bias_rate
        apart = [axis for axis in LOSS_AXES if mesh[axis].size() > 1]
        groups = [mesh.get_group(axis) for axis in apart]
        # Stages count their own layers.
        self._groups = [*groups, mesh.get_group("pp")] if mesh["pp"].size() > 1 else groups
        self._layers = model.config.mixed
        block = "mlp" if model.config.layer_inputs is None else "mixture"
        self.names = [f"layers.{number}.{block}" for number in self._layers]
        """The mixtures, of other processes' stages as well."""
        self._held: dict[int, tuple[MixtureOfExperts, Load]] = {}
        for number, layer in enumerate(model.layers):
            if (mixture := mixture_of(layer)) is not None:
                self._held[number] = mixture, Load(mixture.count, device)
                mixture.observers.append(self._held[number][1])
                if chosen is not None and isinstance(chosen.balance, float):
                    mixture.observers.append(BalancingLoss(chosen.balance, micro_batches, groups))
        self.load_LX = torch.zeros(
            len(self._layers), model.config.experts.count, dtype=torch.int64, device=device
        )
        """Loads of the last measured step, over all processes; a row for each layer with experts."""

    def measure(self) -> dict[str, float]:
        """Add up the choices since the last time, over all processes; the fullest layer's figure and each layer's."""
        self.load_LX.zero_()
        for row, number in enumerate(self._layers):
            if number in self._held:
                counts_X = self._held[number][1].counts_X
                self.load_LX[row] = counts_X
                counts_X.zero_()
        for group in self._groups:
            dist.all_reduce(self.load_LX, group=group)
        fullest = (self.load_LX.amax(1) / self.load_LX.double().mean(1)).tolist()
        each = {f"{FULLEST}/{number}": load for number, load in zip(self._layers, fullest, strict=True)}
        return {FULLEST: max(fullest), **each}

    @torch.no_grad()
    def update(self) -> None:
        """Move the biases by the loads that were measured."""
        if not self.rate:
            return
        error_LX = self.load_LX.double().mean(1, keepdim=True) - self.load_LX
        for error_X, number in zip(error_LX, self._layers, strict=True):
            if number in self._held:
                bias = self._held[number][0].bias
                assert bias is not None
                bias += self.rate * error_X.sign().to(bias.dtype)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The biases that move, as the model calls them."""
        if not self.rate:
            return {}
        names = dict(zip(self._layers, self.names, strict=True))
        found = {f"{names[number]}.bias": mixture.bias for number, (mixture, _) in self._held.items()}
        return {name: bias for name, bias in found.items() if bias is not None}
