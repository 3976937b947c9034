"""An EAGLE-3 head: one layer over the next token's embedding and features of three of the decoder's layers."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from torchwright.core.errors import ModelError
from torchwright.hub.files import TOGETHER, TensorFiles
from torchwright.models.decoder.attention import PagedAttention
from torchwright.models.decoder.batch import Batch
from torchwright.models.decoder.cache import LayerCache
from torchwright.models.decoder.draft.draft import Draft, Likeliest, likeliest
from torchwright.models.decoder.draft.eagle_config import EagleConfig
from torchwright.models.decoder.feed_forward import feed_forward
from torchwright.models.decoder.functional import ops
from torchwright.models.decoder.model import Decoder
from torchwright.models.decoder.paged_model import PagedModel
from torchwright.models.decoder.program import Cells, Program, no_kernels, not_packed
from torchwright.models.decoder.rotary_cache import RotaryCache
from torchwright.models.decoder.weights import LayerParts, MakeLinear

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LAYER_PREFIXES = ("midlayer.", "layers.0.")
"""Prefixes of the layer's tensors, as SpecForge and as speculators write them."""
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
"""Tensors that a head may do without: the model's own stand in for them."""
UNUSED = ("t2d", "verifier_lm_head.weight", "verifier_norm.weight")
"""Tensors that only the head's training reads."""


class HeadWeights(LayerParts):
    """The tensors of a head's folder, checked as they are read."""

    def __init__(
        self,
        folder: Path,
        config: EagleConfig,
        dtype: torch.dtype,
        make_linear: MakeLinear,
        device: torch.device,
    ) -> None:
        self._files, self._config = TensorFiles(folder), config
        self._dtype, self._make_linear, self.device = dtype, make_linear, device
        names = self._files.names()
        self._names = {name.removeprefix("model."): name for name in names}
        self._prefix = next(
            (prefix for prefix in LAYER_PREFIXES if any(name.startswith(prefix) for name in self._names)),
            LAYER_PREFIXES[0],
        )
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def tensor(self, name: str, shape: tuple[int, ...], *dtypes: torch.dtype) -> torch.Tensor:
        """A tensor of this shape, in one of these types; floats by default."""
        self._read.add(name)
        found = self._files.get(self._names.get(name, name))
        if tuple(found.shape) != shape or found.dtype not in (dtypes or FLOATS):
            raise ModelError(
                f"the tensor '{name}' in {self._files.folder} is not a head's for this model",
                found=f"{list(found.shape)} of {found.dtype}",
                allowed=f"{list(shape)} of {' or '.join(str(dtype) for dtype in dtypes or FLOATS)}",
                next=TOGETHER,
            )
        if found.is_floating_point() and not bool(found.isfinite().all()):
            raise ModelError(f"the tensor '{name}' in {self._files.folder} holds NaN or infinity")
        return found.to(self._dtype) if found.is_floating_point() else found

    def finish(self) -> None:
        """Raise `ModelError` for tensors that nobody has read: the head computes more than is known here."""
        left = sorted(set(self._names) - self._read - set(UNUSED))
        if left:
            raise ModelError(
                f"the head in {self._files.folder} has tensors that EAGLE-3 heads are not known to have",
                found=", ".join(left[:8]),
            )
        self._files.close()

    def release(self) -> None:
        """Keep the files open; `finish` closes them."""

    def matrix(self, name: str, shape: tuple[int, int]) -> nn.Module:
        """A linear layer at the top of the head."""
        return self._make_linear(self.tensor(name, shape).contiguous(), None).to(self.device)

    def vector(self, name: str, size: int) -> torch.Tensor:
        """A norm's weight, in float32."""
        return self.tensor(name, (size,)).float().to(self.device)

    def norm(self, layer: int, part: str) -> torch.Tensor | None:
        names = {"pre_mlp": "post_attention_layernorm", "hidden": "hidden_norm", "input": "input_layernorm"}
        if part not in names:
            return None
        return self.vector(f"{self._prefix}{names[part]}.weight", self._config.layer.model)

    def linear(self, layer: int, part: str) -> nn.Module:
        config = self._config.layer
        E, F, q, kv = (
            config.model,
            config.feed_forward,
            config.heads * config.head_dim,
            config.kv_heads * config.head_dim,
        )
        attention, mlp = "self_attn.", "mlp."
        rows: dict[str, tuple[list[tuple[str, int]], int, bool]] = {
            "qkv": (
                [(f"{attention}q_proj", q), (f"{attention}k_proj", kv), (f"{attention}v_proj", kv)],
                2 * E,
                config.qkv_bias,
            ),
            "o": ([(f"{attention}o_proj", E)], q, config.o_bias),
            "gate_up": ([(f"{mlp}gate_proj", F), (f"{mlp}up_proj", F)], E, config.mlp_bias),
            "down": ([(f"{mlp}down_proj", E)], F, config.mlp_bias),
        }
        parts, width, biased = rows[part]
        weight_NK = torch.cat(
            [self.tensor(f"{self._prefix}{name}.weight", (count, width)) for name, count in parts]
        )
        bias_N = None
        if biased:
            bias_N = torch.cat([self.tensor(f"{self._prefix}{name}.bias", (count,)) for name, count in parts])
        return self._make_linear(weight_NK, bias_N)


class EagleDraft(Draft):
    """An EAGLE-3 head (Li et al., 2025), in the formats of SpecForge and speculators."""

    kind: ClassVar[str] = "EAGLE-3"
    lag: ClassVar[int] = 1
    embedding: torch.Tensor
    fuse_norm: torch.Tensor | None
    feature_norms: torch.Tensor | None
    input_norm: torch.Tensor
    hidden_norm: torch.Tensor
    pre_mlp: torch.Tensor
    final_norm: torch.Tensor

    def __init__(self, config: EagleConfig, weights: HeadWeights, decoder: Decoder) -> None:
        super().__init__()
        self.config, layer = config, config.layer
        self.width = layer.model
        self.observed, self.page_shapes = config.observed, layer.page_shapes
        E, wide = layer.model, len(config.observed) * config.target_model
        self.fuse = weights.matrix("fc.weight", (E, wide))
        self.attention = PagedAttention(layer, weights, 0).to(weights.device)
        self.mlp = feed_forward(layer, weights, 0).to(weights.device)
        self._embed(weights, decoder)
        self._answer_with(weights, decoder)
        self._borrows = [
            part for part, name in (("embedding", EMBEDDING), ("head", HEAD)) if name not in weights
        ]
        norms: dict[str, torch.Tensor | None] = {
            "fuse_norm": weights.vector("input_norm.weight", wide) if config.norm_before_fuse else None,
            "feature_norms": self._feature_norms(weights) if config.norm_features else None,
            "input_norm": weights.norm(0, "input"),
            "hidden_norm": weights.norm(0, "hidden"),
            "pre_mlp": weights.norm(0, "pre_mlp"),
            "final_norm": weights.vector("norm.weight", E),
        }
        for name, norm in norms.items():
            self.register_buffer(name, norm)
        self.rotary = RotaryCache(layer)
        weights.finish()

    def _feature_norms(self, weights: HeadWeights) -> torch.Tensor:
        size = self.config.target_model
        return torch.stack(
            [weights.vector(f"fc_norm.{place}.weight", size) for place in range(len(self.observed))]
        )

    def _normed(self, hidden_TE: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(hidden_TE.contiguous(), self.final_norm, self.config.layer.eps)

    def _embed(self, weights: HeadWeights, decoder: Decoder) -> None:
        layer, name = self.config.layer, EMBEDDING
        if name not in weights and self.config.target_model != layer.model:
            raise ModelError(
                "the head has no embedding of its own, and is not as wide as the model",
                found=f"{layer.model} numbers a token, and the model's {self.config.target_model}",
            )
        own = weights.tensor(name, (layer.vocabulary, layer.model)) if name in weights else decoder.embedding
        # Heads carry the decoder's own embedding, which need not lie in memory twice.
        same = own.shape == decoder.embedding.shape and torch.equal(own, decoder.embedding.cpu())
        self.register_buffer("embedding", decoder.embedding if same else own.to(weights.device))

    def _answer_with(self, weights: HeadWeights, decoder: Decoder) -> None:
        config, name = self.config, HEAD
        E, whole = config.layer.model, config.draft_vocabulary == config.layer.vocabulary
        if name not in weights and not (whole and config.target_model == E):
            raise ModelError("the head has no output layer (lm_head.weight), and cannot use the model's")
        head = weights.matrix(name, (config.draft_vocabulary, E)) if name in weights else decoder.head
        self.head: nn.Module = head
        ids_D = torch.arange(config.draft_vocabulary)
        if "d2t" in weights:
            ids_D = ids_D + weights.tensor("d2t", (config.draft_vocabulary,), torch.int64, torch.int32)
        elif not whole:
            raise ModelError("the head proposes from a part of the vocabulary, and does not say which (d2t)")
        if not bool(((ids_D >= 0) & (ids_D < config.layer.vocabulary)).all()):
            raise ModelError("the head's d2t names tokens beyond the vocabulary")
        self._ids = ids_D.numpy()

    def read_from(self, decoder: PagedModel) -> None:
        """See `Draft`."""
        for part in self._borrows:
            setattr(self, part, getattr(decoder, part))

    def forward(self, batch: Batch, states_TX: torch.Tensor | None, pages: LayerCache) -> torch.Tensor:
        """See `Draft`."""
        assert states_TX is not None, "an EAGLE head is called without features"
        eps = self.config.layer.eps
        # Features and the head's own states are equally wide only where a head observes a single layer.
        wide = states_TX.shape[1] == len(self.observed) * self.config.target_model
        states_TE = self._fused(states_TX) if wide else states_TX
        embedded_TE = F.embedding(batch.ids_T, self.embedding)
        hidden_TE = ops.rms_norm(states_TE.contiguous(), self.hidden_norm, eps)
        x_TE = torch.cat([ops.rms_norm(embedded_TE, self.input_norm, eps), hidden_TE], dim=-1)
        stream_TE = hidden_TE if self.config.norm_before_residual else states_TE
        (angles,) = self.rotary.by_layer(batch)
        delta_TE = self.attention(x_TE, batch, angles, pages.layers[0])
        x_TE, stream_TE = ops.add_rms_norm(delta_TE, stream_TE.contiguous(), self.pre_mlp, eps)
        hidden_TE = stream_TE + self.mlp(x_TE)
        return self._normed(hidden_TE) if self.config.normed_states else hidden_TE

    def _fused(self, features_TF: torch.Tensor) -> torch.Tensor:
        eps = self.config.layer.eps
        if self.fuse_norm is not None:
            features_TF = ops.rms_norm(features_TF.contiguous(), self.fuse_norm, eps)
        if self.feature_norms is not None:
            parts = zip(features_TF.chunk(len(self.observed), dim=1), self.feature_norms, strict=True)
            features_TF = torch.cat(
                [ops.rms_norm(part.contiguous(), norm, eps) for part, norm in parts], dim=1
            )
        return self.fuse(features_TF)

    def likeliest(self, hidden_NE: torch.Tensor, count: int) -> Likeliest:
        """See `Draft`."""
        x_NE = hidden_NE if self.config.normed_states else self._normed(hidden_NE)
        return likeliest(self.head(x_NE).float(), count, self._ids)

    @property
    def unplanned(self) -> str | None:
        """See `Draft`."""
        if self.rotary.by_length:
            return "the head's angles depend on the length"
        of_layer = self.attention.unplanned or self.mlp.unplanned
        return no_kernels(self.embedding) or of_layer or not_packed(self.fuse, self.head)

    def program(self, pages: LayerCache, *, observes: bool) -> Program:
        """See `Draft`."""
        config, E = self.config, self.config.layer.model
        program = Program(self.embedding, config.layer.eps)
        stream, delta, x = program.stream, program.delta, program.x
        if observes:
            self._plan_fuse(program)
        else:
            program.receive(stream)
        joined = program.rows(2 * E)
        embedded, hidden = joined.split(E, E)
        program.lookup(self.embedding, 1, x)
        program.norm(self.input_norm, x, embedded)
        program.norm(self.hidden_norm, stream, hidden)
        if config.norm_before_residual:
            program.copy(hidden, stream)
        self.attention.plan(program, joined, delta, 0, pages.layers[0])
        program.join(delta, self.pre_mlp)
        self.mlp.plan(program, x, delta)
        program.add(stream, delta, stream)
        program.norm(self.final_norm, stream, x)
        program.finish(x, self.head)
        program.carry(x if config.normed_states else stream, torch.from_numpy(self._ids))
        return program

    def angles(self, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Draft`."""
        return self.rotary.table(0, longest, self.embedding.device)

    def _plan_fuse(self, program: Program) -> None:
        """Add what `_fused` does; the stream begins with it."""
        size, count = self.config.target_model, len(self.observed)
        with program.scope():
            features: Cells = program.rows(count * size)
            program.receive(features)
            if self.fuse_norm is not None:
                program.norm(self.fuse_norm, features, features)
            if self.feature_norms is not None:
                for part, norm_E in zip(features.split(*[size] * count), self.feature_norms, strict=True):
                    program.norm(norm_E.contiguous(), part, part)
            program.linear(self.fuse, features, program.stream)
