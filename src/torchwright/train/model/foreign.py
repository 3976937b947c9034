"""Any causal language model of transformers, by transformers' own code: where no family of the decoder describes it.

Weights come from safetensors, and no code from a model's folder is run (`load_model`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchwright.core.errors import ModelError
from torchwright.core.layer_types import overridden
from torchwright.hardware.kernels import norm
from torchwright.hub.folder import copy_files, model_files, read_config
from torchwright.models.decoder.config import DecoderConfig, UnsupportedArchitecture
from torchwright.models.decoder.families import read_decoder_config
from torchwright.train.model.attention import visible
from torchwright.train.model.fill import whole
from torchwright.train.model.four_bit import FourBitLinear
from torchwright.train.model.lora import NAME, adapters, merged_weight
from torchwright.train.model.loss import token_loss
from torchwright.workloads.huggingface import load_model, quiet_transformers


@dataclass(frozen=True, kw_only=True)
class ForeignConfig:
    """The trainer's view of a model without a native family."""

    architecture: str
    vocabulary: int
    context: int | None
    """The most tokens of one sequence, where there is an end."""
    bos: int | None
    eos: tuple[int, ...]


ModelConfig = DecoderConfig | ForeignConfig
WINDOWS = ("sliding_window", "attention_chunk_size")
"""Names for the attention window in transformers' configurations."""
SAME = 1e-4
"""Relative error of logits in float32 that comes of another order of sums."""


def end_token(config: ModelConfig) -> int | None:
    """The token that closes a document, where the model has one."""
    return config.eos[0] if config.eos else None


def read_model_config(folder: Path) -> ModelConfig:
    """The shape of a folder's model; raises `ModelError` where neither our families nor transformers describe it."""
    try:
        config = read_decoder_config(folder)
    except UnsupportedArchitecture as unsupported:
        return _read_foreign(folder, unsupported)
    if config.untrained is not None:
        unsupported = UnsupportedArchitecture(f"the trainer's layers have no {config.untrained}: {folder}")
        return _read_foreign(folder, unsupported)
    return config


def _read_foreign(folder: Path, unsupported: UnsupportedArchitecture) -> ForeignConfig:
    data = read_config(folder)
    try:
        with quiet_transformers():
            from transformers import AutoConfig, AutoModelForCausalLM

            config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
            known = type(config) in AutoModelForCausalLM._model_mapping
    except (ImportError, OSError, ValueError) as error:  # no such model type, or fields that are wrong
        raise ModelError(
            f"neither the decoder nor transformers has a model for {folder}", found=str(error).splitlines()[0]
        ) from error
    if not known:
        raise unsupported
    text = config.get_text_config()
    eos = data.get("eos_token_id", getattr(text, "eos_token_id", None))
    return ForeignConfig(
        architecture=(data.get("architectures") or [data.get("model_type", "")])[0],
        vocabulary=text.vocab_size,
        context=getattr(text, "max_position_embeddings", None),
        bos=getattr(text, "bos_token_id", None),
        eos=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
    )


class Foreign(nn.Module):
    """A causal language model of transformers with the trainer's interface, `Transformer`'s."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network: Any = network
        self.apart = False
        """True if packed documents do not attend to each other (`keeps_apart`)."""

    @property
    def layers(self) -> nn.ModuleList:
        """The stack that holds most of the parameters."""
        stacks = [module for module in self.network.modules() if isinstance(module, nn.ModuleList)]
        return max(stacks, key=lambda stack: sum(p.numel() for p in stack.parameters()))

    def forward(
        self,
        ids_BT: torch.Tensor,
        positions_BT: torch.Tensor | None = None,
        documents_BT: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits (B, T, V) of ids (B, T), of rows of several documents with positions and where they begin."""
        if documents_BT is None:
            return self.network(input_ids=ids_BT, use_cache=False).logits
        places_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        hidden_BTS = ~visible(places_T, places_T, 0, documents_BT)
        # Eager attention adds the mask, the fused operator takes it as it is.
        mask_BTS = torch.zeros_like(hidden_BTS, dtype=self.network.dtype).masked_fill_(hidden_BTS, -torch.inf)
        return self.network(
            input_ids=ids_BT, position_ids=positions_BT, attention_mask=mask_BTS[:, None], use_cache=False
        ).logits

    def loss(
        self,
        ids_BT: torch.Tensor,
        labels_BT: torch.Tensor,
        positions_BT: torch.Tensor | None = None,
        documents_BS: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Like `Transformer.loss`; raises `ModelError` for packed documents that the model does not keep apart."""
        if documents_BS is not None and not self.apart:
            raise ModelError(
                f"{type(self.network).__name__} reads rows of one text each, and these are of several documents",
                found="its layers have windows of their own, or read a document by those before it, masks or not",
                next='set data.packing = "stream"; chats take an attention model',
            )
        return token_loss(self(ids_BT, positions_BT, documents_BS), labels_BT)


def build_foreign(folder: Path, device: str) -> Foreign:
    """Build the folder's model, every parameter in float32 and trainable; each process holds the whole model."""
    network = load_model(folder, "AutoModelForCausalLM").requires_grad_(True)
    norm.use_layer_norm(network)
    model = Foreign(network.to(device))
    model.apart = keeps_apart(model.eval())
    return model.train()


@torch.no_grad()
def keeps_apart(model: Foreign) -> bool:
    """Check by running the model whether a document's logits are the same alone and after another document."""
    text = model.network.config.get_text_config()
    if any(getattr(text, name, None) for name in WINDOWS):  # for which one mask for all layers would stand
        return False
    first, tokens, device = 5, 11, next(model.parameters()).device
    place_T = torch.arange(tokens, device=device)
    ids_BT = (7 * place_T % text.vocab_size)[None]
    documents_BT = torch.where(place_T < first, 0, first)[None]
    try:
        packed_BTV = model(ids_BT, place_T - documents_BT, documents_BT)[:, first:]
    except (TypeError, ValueError, RuntimeError):  # no such argument, or no mask of this form
        return False
    alone_BTV = model(ids_BT[:, first:])
    return bool((packed_BTV - alone_BTV).norm() <= SAME * alone_BTV.norm())


def linear_names(model: Foreign) -> Iterator[str]:
    """List the linear layers (`nn.Linear`, GPT-2's `Conv1D`) within the model's layers that can have an adapter.

    A subclass with a forward of its own has none: the merged weight would not compute what both compute. Of a
    state-space mixer only `in_proj` has one: its fused kernels take the other weights without calling their layers.
    """
    with quiet_transformers():
        from transformers.pytorch_utils import Conv1D

    inside = set(model.layers.modules())
    for name, module in model.named_modules():
        adapted = NAME in module._modules  # has a forward of its own, by `add_adapters`
        if module not in inside or (not adapted and overridden(module, (nn.Linear, Conv1D))):
            continue
        parent, _, last = name.rpartition(".")
        in_mixer = any(isinstance(beside, nn.Conv1d) for beside in model.get_submodule(parent).children())
        if not in_mixer or last == "in_proj":
            yield name


@torch.no_grad()
def save_foreign(network: nn.Module, folder: Path, *, source: Path, writes: bool) -> None:
    """Write a folder that transformers loads, adapters merged; of a sharded model every process takes part."""
    held = adapters(network)
    values: dict[str, torch.Tensor] = {}
    once: dict[int, torch.Tensor] = {}
    for name, tensor in network.state_dict(keep_vars=True).items():
        layer, _, kind = name.rpartition(".")
        if f".{NAME}." in name or (kind in FOUR_BIT and layer.endswith(".weight")):
            continue
        if layer in held and kind == "weight":
            continue
        value = once.setdefault(id(tensor), whole(tensor.detach()).cpu())
        values[name] = value
    for name, module in network.named_modules():
        if name in held or isinstance(module, FourBitLinear):
            full = merged_weight(module)
            values[f"{name}.weight"] = (
                full if isinstance(module, nn.Linear | FourBitLinear) else full.T
            ).cpu()
    if not writes:
        return
    with quiet_transformers():
        saves: Any = network
        saves.save_pretrained(folder, state_dict=values)
    files = model_files(source, weights=False)
    copy_files({name: file for name, file in files.items() if not (folder / name).exists()}, folder)


FOUR_BIT = ("codes", "scale", "table")
