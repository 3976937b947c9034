"""The model of a run: transformers' own, with the loss of its labels, sharded over the run's processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.batchnorm import _BatchNorm

from torchwright.hardware.kernels import norm
from torchwright.train.media.samples import MediaBatch
from torchwright.train.model.vocabulary import IGNORE
from torchwright.train.parallel.foreign import shard_foreign
from torchwright.workloads.huggingface import load_model


class Media(nn.Module):
    """A model whose output has `logits`, over classes or over tokens."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network: Any = network
        self.frozen_norms = False
        """True if batch norms keep their statistics, as they do with adapters."""

    def train(self, mode: bool = True) -> Media:
        super().train(mode)
        if self.frozen_norms:
            for module in self.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()
        return self

    @property
    def layers(self) -> list[nn.Module]:
        """Those of its outermost stacks."""
        found: list[nn.Module] = []
        inside: set[nn.Module] = set()
        for module in self.network.modules():
            if isinstance(module, nn.ModuleList) and module not in inside:
                inside |= {*module.modules()}
                found += [layer for layer in module if not isinstance(layer, nn.ModuleList)]
        return found

    def loss(self, batch: MediaBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of the negative log-likelihoods of the labels, and how many of them are the likeliest."""
        logits = self.network(**batch.inputs).logits.flatten(0, -2).float()
        labels = batch.labels.flatten()
        nll = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
        return nll, (logits.detach().argmax(-1) == labels).sum()[None].to(nll.dtype)

    def average_statistics(self) -> None:
        """Let every process have the mean of what its batch norms saw of its own samples. Collective."""
        if dist.get_world_size() == 1:
            return
        for statistic in self.statistics().values():
            if statistic.is_floating_point():
                dist.all_reduce(statistic)
                statistic /= dist.get_world_size()

    def statistics(self) -> dict[str, torch.Tensor]:
        """Return the batch norms' running statistics, by name."""
        return (
            {}
            if self.frozen_norms
            else {
                f"{name}.{kind}": buffer
                for name, module in self.named_modules()
                if isinstance(module, _BatchNorm)
                for kind, buffer in module.named_buffers(recurse=False)
            }
        )


class LabelLoss:
    """The negative log-likelihood of each label, and the share of labels that are the likeliest."""

    figures: tuple[str, ...] = ("accuracy",)

    def __init__(self, model: Media) -> None:
        self._model = model

    def count(self, batch: MediaBatch) -> torch.Tensor:
        return (batch.labels != IGNORE).sum()

    def __call__(self, batch: MediaBatch) -> tuple[torch.Tensor, torch.Tensor]:
        return self._model.loss(batch)


def classifier(folder: Path, labels: Sequence[str], seed: int) -> nn.Module:
    """The folder's image classifier; its head is made at random, by the seed, where it tells other classes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return trained(load_model(folder, "AutoModelForImageClassification", labels))


def recognizer(folder: Path) -> nn.Module:
    """The folder's Whisper; the places of the encoder's frames are waves, which nobody trains."""
    network: Any = trained(load_model(folder, "AutoModelForSpeechSeq2Seq"))
    network.get_encoder().embed_positions.requires_grad_(False)
    return network


def trained(network: nn.Module) -> nn.Module:
    norm.use_layer_norm(network)
    return network.requires_grad_(True)


def shard(model: Media, layout: Any, mesh: DeviceMesh) -> None:
    """Share the model out over the run's processes, in place."""
    shard_foreign(model, model.layers, layout, mesh)


def fill_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Zeros for what a step did not reach: a checkpoint holds an optimizer's state of every parameter."""
    for parameter in parameters:
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
