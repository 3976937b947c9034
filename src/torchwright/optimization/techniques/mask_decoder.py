"""Many prompts on one picture by fewer products: SAM's mask decoder with its projections absorbed.

The decoder projects the 4,096 places of a picture to keys, values and queries again for each prompt, which has seven
tokens. Scores and outputs are bilinear: (Wq t)ᵀ(Wk p) = (Wkᵀ Wq t)ᵀ p, and Σ aᵢ Wv pᵢ = Wv Σ aᵢ pᵢ. So the tokens
absorb the projections of places, as DeepSeek-V2 (2024) absorbs those of its latent attention: eight heads of seven
tokens meet the 256 features themselves instead of their 128 projections. A bias of keys adds the same to all scores
of a query, so softmax cancels it. The input of the first layer is the same for all prompts and stays one picture. A
transposed convolution with disjoint pieces is a product, whose pieces are placed once, as masks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from torchwright.core.layer_types import attached, computes_as
from torchwright.optimization.techniques.base import Phase, Target, Technique
from torchwright.optimization.techniques.shared.wrapping import of_classes, replace_module, replace_where

TRANSFORMERS = frozenset(
    f"transformers.models.{module}.{name}TwoWayTransformer"
    for module, name in (
        ("sam.modeling_sam", "Sam"),
        ("sam_hq.modeling_sam_hq", "SamHQ"),
        ("sam2.modeling_sam2", "Sam2"),
    )
)
"""Classes in which a few tokens and the places of a picture attend to each other, all in the same way."""
DECODER = "transformers.models.sam.modeling_sam.SamMaskDecoder"
"""The class whose pictures are shared and whose masks are made by products; others add features in between."""


@dataclass(frozen=True, kw_only=True)
class MaskDecoder(Technique):
    """Prompts of SAM's mask decoder take over the picture's projections, and masks are made by matrix products."""

    name: ClassVar[str] = "mask_decoder"
    phase: ClassVar[Phase] = Phase.GRAPH
    needs: ClassVar[frozenset[str]] = frozenset({"eager", "float32"})

    def refuse(self, target: Target) -> str | None:
        found = _attentions(target.model)
        if not found:
            return "the model has no mask decoder of SAM's kind"
        reasons = [_reason(layer) for _, layer, _ in found]
        return None if None in reasons else "; ".join(sorted(set(map(str, reasons))))

    def apply(self, target: Target) -> None:
        found = _attentions(target.model)
        kinds = {layer: kind for _, layer, kind in found}
        layers = [(name, layer) for name, layer, _ in found]
        left = replace_where(target.model, layers, _reason, lambda layer: kinds[layer](layer))
        for _, decoder in of_classes(target.model, {DECODER}):
            if not left and not any(map(attached, _uncalled(decoder))):
                replace_module(target.model, decoder, MasksByProducts(decoder))
        self.cover(target, len(found), unit="attention layers", kernel="matrix products", skipped=left)


class _Absorbed(nn.Module):
    """Attention whose projections of places are weights that tokens are multiplied with."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.heads, self.scale = original.num_attention_heads, original.scaling

    def _split(self, x_PTI: torch.Tensor) -> torch.Tensor:
        return x_PTI.unflatten(-1, (self.heads, -1))


class TokensAsk(_Absorbed):
    """A prompt's tokens ask the picture's places: (B, P, T, E) of (B·P or 1, 1, N, E), as SamAttention answers."""

    def __init__(self, original: Any) -> None:
        super().__init__(original)
        self.q_proj, self.out_proj = original.q_proj, _out(original)
        self.key_HDE = nn.Parameter(_by_head(original.k_proj.weight, self.heads))
        self.value_HDE = nn.Parameter(_by_head(original.v_proj.weight, self.heads))
        self.value_bias = nn.Parameter(original.v_proj.bias.detach())

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_similarity: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        """`attention_similarity` is added to the scores (B·P or 1, H or 1, T or 1, N)."""
        q_PTHD = self._split(self.q_proj(query.flatten(0, 1)))
        asked_PHTE = torch.einsum("pthd,hde->phte", q_PTHD * self.scale, self.key_HDE)
        scores_PHTN = _product(asked_PHTE, key.flatten(0, 1).mT)
        if attention_similarity is not None:
            scores_PHTN = scores_PHTN + attention_similarity
        found_PHTE = _product(scores_PHTN.softmax(-1), value.flatten(0, 1))
        y_PTHD = torch.einsum("phte,hde->pthd", found_PHTE, self.value_HDE)
        return self.out_proj(y_PTHD.flatten(2) + self.value_bias).view(query.shape), None


class PlacesAsk(_Absorbed):
    """The picture's places ask a prompt's tokens: (B·P or 1, 1, N, E) of (B, P, T, E), (B·P, 1, N, E) out."""

    def __init__(self, original: Any) -> None:
        super().__init__(original)
        out = _out(original)
        self.k_proj, self.v_proj = original.k_proj, original.v_proj
        self.query_HDE = nn.Parameter(_by_head(original.q_proj.weight, self.heads))
        self.query_bias_HD = nn.Parameter(original.q_proj.bias.detach().unflatten(0, (self.heads, -1)))
        self.out_HDE = nn.Parameter(_by_head(out.weight.T, self.heads))
        self.out_bias = nn.Parameter(out.bias.detach())

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        k_PTHD = self._split(self.k_proj(key.flatten(0, 1))) * self.scale
        v_PTHD = self._split(self.v_proj(value.flatten(0, 1)))
        bias_PHT1 = torch.einsum("pthd,hd->pht", k_PTHD, self.query_bias_HD)[..., None]
        # Tokens in front of places: softmax over seven numbers side by side would be no work for vectors.
        scores_PHTN = _product(torch.einsum("pthd,hde->phte", k_PTHD, self.query_HDE), query.flatten(0, 1).mT)
        weights_PRN = (scores_PHTN + bias_PHT1).softmax(2).flatten(1, 2)
        answers_PRE = torch.einsum("pthd,hde->phte", v_PTHD, self.out_HDE).flatten(1, 2)
        return (torch.bmm(weights_PRN.transpose(1, 2), answers_PRE) + self.out_bias)[:, None], None


class MasksByProducts(nn.Module):
    """Computes transformers' SamMaskDecoder, with its transposed convolutions as products over the features."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.iou_token, self.mask_tokens = original.iou_token, original.mask_tokens
        self.transformer, self.norm = original.transformer, original.upscale_layer_norm
        self.hypernetworks, self.scores = original.output_hypernetworks_mlps, original.iou_prediction_head
        self.first, self.first_bias = _as_product(original.upscale_conv1)
        self.second, self.second_bias = _as_product(original.upscale_conv2)

    def forward(
        self,
        image_embeddings: torch.Tensor,
        image_positional_embeddings: torch.Tensor,
        sparse_prompt_embeddings: torch.Tensor,
        dense_prompt_embeddings: torch.Tensor,
        multimask_output: bool,
        attention_similarity: torch.Tensor | None = None,
        target_embedding: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        B, P, _, _ = sparse_prompt_embeddings.shape
        own = torch.cat([self.iou_token.weight, self.mask_tokens.weight])
        tokens_BPTE = torch.cat([own.expand(B, P, -1, -1), sparse_prompt_embeddings], 2).to(own.dtype)
        picture, positions = image_embeddings + dense_prompt_embeddings, image_positional_embeddings
        if B > 1:
            picture, positions = (each.repeat_interleave(P, 0) for each in (picture, positions))
        tokens_BPTE, places_Q1NE = self.transformer(
            point_embeddings=tokens_BPTE,
            image_embeddings=picture,
            image_positional_embeddings=positions,
            attention_similarity=attention_similarity,
            target_embedding=target_embedding,
        )
        wanted = range(1, len(self.hypernetworks)) if multimask_output else range(1)
        makers_BPME = torch.stack([self.hypernetworks[m](tokens_BPTE[:, :, 1 + m]) for m in wanted], 2)
        masks = self._masks(makers_BPME.flatten(0, 1), places_Q1NE[:, 0], *picture.shape[-2:])
        scores_BPM = self.scores(tokens_BPTE[:, :, 0])[..., wanted.start : wanted.stop]
        return masks.unflatten(0, (B, P)), scores_BPM

    def _masks(self, makers_QME: torch.Tensor, places_QNE: torch.Tensor, Y: int, X: int) -> torch.Tensor:
        """(Q, M, 4Y, 4X): each place becomes two by two, and each of these two by two again."""
        norm = self.norm
        halves = F.linear(places_QNE, self.first, self.first_bias).unflatten(-1, (4, -1))
        halves = F.gelu(F.layer_norm(halves, norm.weight.shape, norm.weight, norm.bias, norm.eps))
        quarters = F.gelu(F.linear(halves, self.second, self.second_bias))
        masks_QMN = torch.bmm(makers_QME, quarters.reshape(len(quarters), -1, makers_QME.shape[-1]).mT)
        pieces = masks_QMN.unflatten(-1, (Y, X, 2, 2, 2, 2))
        return pieces.permute(0, 1, 2, 4, 6, 3, 5, 7).reshape(*masks_QMN.shape[:2], 4 * Y, 4 * X)


def _uncalled(decoder: Any) -> tuple[nn.Module, ...]:
    """Submodules that `MasksByProducts` no longer calls."""
    return (
        decoder,
        decoder.upscale_conv1,
        decoder.upscale_conv2,
        decoder.upscale_layer_norm,
        decoder.activation,
    )


def _product(rows_PHTX: torch.Tensor, matrices_QXY: torch.Tensor) -> torch.Tensor:
    """(P, H, T, Y): by each prompt's own matrix; one for all prompts (Q = 1) is multiplied with once."""
    P, H, T, _ = rows_PHTX.shape
    if len(matrices_QXY) == 1:
        return (rows_PHTX.flatten(0, 2) @ matrices_QXY[0]).unflatten(0, (P, H, T))
    return torch.bmm(rows_PHTX.flatten(1, 2), matrices_QXY).unflatten(1, (H, T))


def _as_product(layer: Any) -> tuple[nn.Parameter, nn.Parameter]:
    """The weight (4·out, in) and bias (4·out) of a transposed convolution of two by two pixels in steps of two."""
    weight = layer.weight.detach().permute(2, 3, 1, 0).flatten(0, 2)
    return nn.Parameter(weight.contiguous()), nn.Parameter(layer.bias.detach().repeat(4))


def _by_head(weight_IE: torch.Tensor, heads: int) -> torch.Tensor:
    return weight_IE.detach().unflatten(0, (heads, -1)).contiguous()


def _out(original: Any) -> Any:
    return getattr(original, "o_proj", None) or getattr(original, "out_proj", None)


def _attentions(model: nn.Module) -> list[tuple[str, Any, type[TokensAsk | PlacesAsk]]]:
    """The attention layers between tokens and places, each with what takes its place."""
    found: list[tuple[str, Any, type[TokensAsk | PlacesAsk]]] = []
    for name, transformer in of_classes(model, TRANSFORMERS):
        for number, layer in enumerate(transformer.layers):
            start = f"{name}.layers.{number}"
            found.append((f"{start}.cross_attn_token_to_image", layer.cross_attn_token_to_image, TokensAsk))
            found.append((f"{start}.cross_attn_image_to_token", layer.cross_attn_image_to_token, PlacesAsk))
        found.append((f"{name}.final_attn_token_to_image", transformer.final_attn_token_to_image, TokensAsk))
    return found


def _reason(layer: Any) -> str | None:
    """Why a layer is left as it is, or None."""
    projections = [getattr(layer, name, None) for name in ("q_proj", "k_proj", "v_proj")]
    layers = (*projections, _out(layer))
    if any(each is None or not computes_as(each, (nn.Linear,)) or each.bias is None for each in layers):
        return "its projections are no plain linear layers with a bias"
    return attached(layer)
