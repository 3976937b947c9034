"""The multi-token prediction (MTP) layer that some checkpoints carry behind their last layer, as a draft."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from torchwright.core.errors import ModelError
from torchwright.hub.checkpoint import Checkpoint
from torchwright.models.decoder.batch import Batch
from torchwright.models.decoder.cache import LayerCache
from torchwright.models.decoder.config import DecoderConfig
from torchwright.models.decoder.draft.draft import Draft, Likeliest, likeliest
from torchwright.models.decoder.functional import ops
from torchwright.models.decoder.layers import Layer
from torchwright.models.decoder.model import Decoder
from torchwright.models.decoder.paged_model import PagedModel
from torchwright.models.decoder.program import Program, no_kernels, not_packed
from torchwright.models.decoder.rotary_cache import RotaryCache
from torchwright.models.decoder.shared import shape_logits
from torchwright.models.decoder.weights import DecoderWeights, MakeLinear


@dataclass(frozen=True, kw_only=True)
class MtpNames:
    """Names of the layer's tensors, without ".weight"; `{}` is the number of the model's layers."""

    layer: str
    join: str
    embedding_norm: str
    hidden_norm: str
    final_norm: str
    embedding: str | None = None
    output: str | None = None
    """Copies of the model's embedding and output layer that published files hold with the layer."""


QWEN = MtpNames(
    layer="mtp.layers.0",
    join="mtp.fc",
    embedding_norm="mtp.pre_fc_norm_embedding",
    hidden_norm="mtp.pre_fc_norm_hidden",
    final_norm="mtp.norm",
)
DEEPSEEK = MtpNames(
    layer="model.layers.{}",
    join="model.layers.{}.eh_proj",
    embedding_norm="model.layers.{}.enorm",
    hidden_norm="model.layers.{}.hnorm",
    final_norm="model.layers.{}.shared_head.norm",
    embedding="model.layers.{}.embed_tokens",
    output="model.layers.{}.shared_head.head",
)
FAMILIES = {
    "Qwen3NextForCausalLM": QWEN,
    "Qwen3_5ForCausalLM": QWEN,
    "Qwen3_5MoeForCausalLM": QWEN,
    "Glm4MoeForCausalLM": DEEPSEEK,
    "DeepseekV3ForCausalLM": DEEPSEEK,
}
"""By architecture, as `families.py` has it."""


class _Renamed:
    """A checkpoint whose layer 0 is the MTP layer."""

    def __init__(self, checkpoint: Checkpoint, prefix: str) -> None:
        self._checkpoint, self._prefix = checkpoint, f"{prefix}."

    def __contains__(self, name: str) -> bool:
        return self._name(name) in self._checkpoint

    def holds(self, name: str) -> bool:
        return self._checkpoint.holds(self._name(name))

    def weight(self, name: str, shape: tuple[int, ...]) -> Any:
        return self._checkpoint.weight(self._name(name), shape)

    def close(self) -> None:
        self._checkpoint.close()

    def _name(self, name: str) -> str:
        return name.replace("model.layers.0.", self._prefix, 1)


class MtpDraft(Draft):
    """One layer over the next token's embedding and the model's last hidden state (DeepSeek-AI, 2024).

    Both the model's state and its own are read behind the final norm, as vLLM and SGLang do (vllm#45895, #47448).
    """

    kind: ClassVar[str] = "MTP"
    lag: ClassVar[int] = 1
    embedding: torch.Tensor
    embedding_norm: torch.Tensor
    hidden_norm: torch.Tensor
    final_norm: torch.Tensor

    def __init__(
        self, decoder: Decoder, checkpoint: Checkpoint, dtype: torch.dtype, make_linear: MakeLinear
    ) -> None:
        super().__init__()
        names, config = FAMILIES[decoder.config.architecture], decoder.config
        self.config, self.observed = one_layer(config), (config.layers,)
        self.page_shapes, self.width = self.config.page_shapes, config.model
        E, device = config.model, decoder.embedding.device
        renamed: Any = _Renamed(checkpoint, names.layer.format(config.layers))
        weights = DecoderWeights(self.config, renamed, dtype, make_linear, device)
        self.layer = Layer(self.config, weights, 0).to(device)
        join = checkpoint.weight(f"{names.join.format(config.layers)}.weight", (E, 2 * E))
        self.join: nn.Module = make_linear(join.rows(0, E).to(dtype).clone(), None).to(device)
        for name in ("embedding_norm", "hidden_norm", "final_norm"):
            file_name = f"{getattr(names, name).format(config.layers)}.weight"
            norm_E = checkpoint.weight(file_name, (E,)).rows(0, E).float() + config.norm_offset
            self.register_buffer(name, norm_E.to(device))
        checkpoint.close()
        self.register_buffer("embedding", decoder.embedding)
        self.head, self.scale = decoder.head, decoder.embedding_scale
        self.rotary = RotaryCache(self.config)

    def read_from(self, decoder: PagedModel) -> None:
        """See `Draft`."""
        assert isinstance(decoder, Decoder)
        self.embedding, self.head = decoder.embedding, decoder.head

    def forward(self, batch: Batch, states_TX: torch.Tensor | None, pages: LayerCache) -> torch.Tensor:
        """See `Draft`."""
        assert states_TX is not None, "an MTP layer is called without the model's states"
        embedded_TE = F.embedding(batch.ids_T, self.embedding)
        if self.scale != 1:
            embedded_TE = embedded_TE * self.scale
        joined = [
            ops.rms_norm(x_TE.contiguous(), norm_E, self.config.eps)
            for x_TE, norm_E in ((embedded_TE, self.embedding_norm), (states_TX, self.hidden_norm))
        ]
        stream_TE = self.join(torch.cat(joined, dim=-1))
        (angles,) = self.rotary.by_layer(batch)
        delta_TE, stream_TE = self.layer(None, stream_TE, batch, angles, pages.layers[0])
        stream_TE = (stream_TE + delta_TE).contiguous()
        return ops.rms_norm(stream_TE, self.final_norm, self.config.eps)

    def likeliest(self, hidden_NE: torch.Tensor, count: int) -> Likeliest:
        """See `Draft`."""
        return likeliest(shape_logits(self.config, self.head(hidden_NE).float()), count)

    @property
    def unplanned(self) -> str | None:
        """See `Draft`."""
        if self.rotary.by_length:
            return "the layer's angles depend on the length"
        if self.config.logit_scale != 1 or self.config.logit_soft_cap:
            return "logits that are scaled or capped"
        return no_kernels(self.embedding) or self.layer.unplanned or not_packed(self.join, self.head)

    def program(self, pages: LayerCache, *, observes: bool) -> Program:
        """See `Draft`; the model's states and its own are alike."""
        E = self.config.model
        program = Program(self.embedding, self.config.eps)
        stream, x = program.stream, program.x
        program.receive(stream)
        joined = program.rows(2 * E)
        embedded, hidden = joined.split(E, E)
        program.lookup(self.embedding, self.scale, x)
        program.norm(self.embedding_norm, x, embedded)
        program.norm(self.hidden_norm, stream, hidden)
        program.linear(self.join, joined, stream)
        program.add(stream, self.layer.plan(program, None, 0, pages.layers[0]), stream)
        program.norm(self.final_norm, stream, x)
        program.finish(x, self.head)
        program.carry(x, torch.arange(self.config.vocabulary))
        return program

    def angles(self, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Draft`."""
        return self.rotary.table(0, longest, self.embedding.device)


def mtp_names(config: DecoderConfig) -> MtpNames:
    """Names of the MTP layer's tensors of a model; raises `ModelError` where its family's are not known."""
    names = FAMILIES.get(config.architecture)
    if names is None:
        raise ModelError(
            f"--draft mtp: MTP layers of {config.architecture} are not known here",
            allowed=", ".join(FAMILIES),
        )
    return names


def has_mtp(config: DecoderConfig, checkpoint: Checkpoint) -> bool:
    """Check whether a checkpoint holds the MTP layer of a model of a known family."""
    return join_name(config) in checkpoint


def join_name(config: DecoderConfig) -> str:
    """The tensor by which an MTP layer is recognized: the one that joins a token's embedding and the state."""
    return f"{mtp_names(config).join.format(config.layers)}.weight"


def check_mtp(folder: Path, config: DecoderConfig, checkpoint: Checkpoint) -> None:
    """Raise `ModelError` unless the folder's checkpoint has an MTP layer that is known here."""
    if not has_mtp(config, checkpoint):
        raise ModelError(
            f"--draft mtp: {folder} has no MTP layer",
            found=f"no tensor '{join_name(config)}'",
            next="files that transformers has saved lack it: take the published checkpoint, or train one with "
            "`torchwright train --draft mtp`",
        )


def one_layer(config: DecoderConfig) -> DecoderConfig:
    """The configuration of a decoder that is one full-attention layer of this one, the last."""
    layer = max(
        index
        for index in range(config.layers)
        if not (config.recurrent and config.recurrent[index]) and not config.windows[index]
    )
    return replace(
        config,
        layers=1,
        windows=(0,),
        ropes=(config.ropes[layer],),
        sparse=(config.sparse[-1],),
        recurrent=(),
        mixer=None,
    )
