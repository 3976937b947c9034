"""The place of each of the model's tensors in a GGUF file: its name there, and its rows in a stacked tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torchwright.core.errors import ModelError
from torchwright.hub.gguf.families import family_of
from torchwright.hub.gguf.family import PARTNER, ByHead, Family, Joined, Stacked, Target
from torchwright.hub.gguf.header import Header
from torchwright.hub.gguf.model import IN_A_LAYER, GgufModel
from torchwright.hub.gguf.rope import TENSORS

LAYER: dict[str, Target] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Tensors of a layer in most families; `Family.names` adds to them and replaces them."""
BARE = ("ssm_a", "ssm_d")
"""Vectors whose names have no last part."""
MOST_EXPERTS, MOST_PLACES = 1024, 1 << 20


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of one of the model's tensors in a file."""

    tensor: str
    rows: tuple[int, int] | None = None
    """The first row and the row after the last one, counted over all experts; None for the whole tensor."""
    partner: str | None = None
    """The tensor whose rows alternate with this one's in the model, expert by expert."""
    by_expert: bool = False
    """True if the model has all experts in one tensor, each matrix transposed."""
    by_head: bool = False
    """True if the model has the partner's values below the keys of each head, which lie transposed here."""
    joined: bool = False
    """True if the partner's rows lie below this tensor's, expert by expert if there are several."""


def places(header: Header) -> dict[str, Place]:
    """Return the place of each tensor by the model's name for it.

    Raises `ModelError` for a tensor that the family does not have, and for two that are the same one of the model.
    """
    family, model = family_of(header)
    tables = _table(family, family.names), _table(family, family.names | family.recurrent)
    found: dict[str, Place] = {}
    for name in header.tensors:
        for model_name, place in _places(family, model, tables, name):
            other = found.setdefault(model_name, place)
            if len(found) > MOST_PLACES:
                raise ModelError(f"{header.path} has more than {MOST_PLACES:,} tensors")
            if other is not place:
                raise ModelError(
                    f"two tensors of {header.path} are the model's '{model_name}'",
                    found=f"{other.tensor} and {place.tensor}",
                    next="take the file of one model",
                )
    return found


def _table(family: Family, names: dict[str, Target]) -> dict[str, Target]:
    """Return what each tensor of a layer is in the model, both by their whole names."""
    found: dict[str, Target] = {}
    for stem, target in (LAYER | names).items():
        if "." in stem or stem in BARE:
            found[stem] = target
            continue
        for part in ("weight", "bias") if stem in family.biases else ("weight",):
            if isinstance(target, tuple):
                found[f"{stem}.{part}"] = tuple(f"{each}.{part}" for each in target)
            elif isinstance(target, str):
                found[f"{stem}.{part}"] = f"{target}.{part}"
    return found


def _places(
    family: Family, model: GgufModel, tables: tuple[dict[str, Target], dict[str, Target]], name: str
) -> Iterator[tuple[str, Place]]:
    if name in TENSORS:
        return iter([])
    if name in family.whole:
        return iter([(family.whole[name], Place(tensor=name))])
    match = IN_A_LAYER.fullmatch(name)
    if match and model.layers <= int(match[1]) < model.blocks:
        return iter([])  # the layer predicts tokens ahead, and the model runs without it
    target = None
    if match and int(match[1]) < model.layers:
        recurrent = bool(model.recurrent) and model.recurrent[int(match[1])]
        target = tables[recurrent].get(match[2])
    if match is None or target is None:
        raise ModelError(
            f"{model.path} has a tensor '{name[:80]}' that {family.architecture} does not have",
            next="take the model's folder with *.safetensors",
        )
    return _of_a_layer(family, model, name, match[2], f"model.layers.{match[1]}.", target)


def _of_a_layer(
    family: Family, model: GgufModel, name: str, inner: str, prefix: str, target: Target
) -> Iterator[tuple[str, Place]]:
    """Yield the model's tensors in one of a layer's; `inner` is its name without the layer."""
    if isinstance(target, Stacked):
        yield from _stacked(model, name, inner, prefix, target)
    elif isinstance(target, ByHead):
        yield from _by_head(model, name, inner, prefix, target)
    elif isinstance(target, Joined):
        yield from _joined(model, name, inner, prefix, target)
    elif isinstance(target, tuple):
        begin = 0
        for each, rows in zip(target, _split(family, model, name), strict=True):
            yield prefix + each, Place(tensor=name, rows=(begin, begin + rows))
            begin += rows
    elif target is not None and "{}" in target:
        rows = _rows_of_an_expert(model, name)
        for expert in range(model.experts):
            place = Place(tensor=name, rows=(expert * rows, (expert + 1) * rows))
            yield prefix + target.format(expert), place
    elif target is not None:
        yield prefix + target, Place(tensor=name)


def _stacked(
    model: GgufModel, name: str, inner: str, prefix: str, target: Stacked
) -> Iterator[tuple[str, Place]]:
    """Yield the tensor that holds all experts; the partner's rows belong to it, and have no place of their own."""
    _rows_of_an_expert(model, name)
    other = _partner(model, name, inner, target)
    if target.model != PARTNER:
        yield prefix + target.model, Place(tensor=name, partner=other, by_expert=True)


def _by_head(
    model: GgufModel, name: str, inner: str, prefix: str, target: ByHead
) -> Iterator[tuple[str, Place]]:
    """Yield the keys with the values below them; the values have no place of their own."""
    if target.model == PARTNER:
        return
    shape = model.tensors[name].shape
    other = name.removesuffix(inner) + target.partner
    partner = model.tensors.get(other)
    if partner is None or [len(shape), len(partner.shape)] != [3, 3] or partner.shape[::2] != shape[:2]:
        raise ModelError(
            f"{model.path} lacks the tensor '{other}'",
            found="none" if partner is None else f"{list(partner.shape)}, beside {list(shape)}",
            allowed="(heads, values, rank), beside (heads, rank, keys)",
        )
    yield prefix + target.model, Place(tensor=name, partner=other, by_head=True)


def _joined(
    model: GgufModel, name: str, inner: str, prefix: str, target: Joined
) -> Iterator[tuple[str, Place]]:
    """Yield the tensor with its partner's rows below; the partner has no place of its own."""
    if "_exps." in name:
        _rows_of_an_expert(model, name)
    elif len(model.tensors[name].shape) != 2:
        raise ModelError(
            f"the tensor '{name}' in {model.path} is {list(model.tensors[name].shape)}", allowed="a matrix"
        )
    other = _partner(model, name, inner, target)
    if target.model != PARTNER:
        yield prefix + target.model, Place(tensor=name, partner=other, joined=True)


def _partner(model: GgufModel, name: str, inner: str, target: Stacked | Joined) -> str | None:
    """Return the name of a tensor's partner; a matrix below another one may have rows of another number."""
    if target.partner is None:
        return None
    other = name.removesuffix(inner) + target.partner
    stored, shape = model.tensors.get(other), model.tensors[name].shape
    free = 1 if isinstance(target, Joined) and len(shape) == 2 else 0
    if stored is None or len(stored.shape) != len(shape) or stored.shape[free:] != shape[free:]:
        raise ModelError(
            f"{model.path} lacks the tensor '{other}'",
            found="none" if stored is None else str(list(stored.shape)),
            allowed=f"{list(shape)}, as '{name}'",
        )
    return other


def _split(family: Family, model: GgufModel, name: str) -> tuple[int, ...]:
    """Return the rows of query, key and value in a tensor that holds them one below the other."""
    queries = model.heads * model.head_dim * (2 if family.output_gate else 1)
    sizes = (queries, *(model.kv_heads * model.head_dim,) * 2)
    shape = model.tensors[name].shape
    if shape[0] != sum(sizes) or len(shape) > 2:
        raise ModelError(
            f"the tensor '{name}' in {model.path} is {list(shape)}",
            allowed=f"{sum(sizes)} rows: query, key and value",
        )
    return sizes


def _rows_of_an_expert(model: GgufModel, name: str) -> int:
    shape, extents = model.tensors[name].shape, 2 if name.endswith(".bias") else 3
    if len(shape) != extents or shape[0] != model.experts or shape[0] > MOST_EXPERTS:
        raise ModelError(
            f"the tensor '{name}' in {model.path} is {list(shape)}",
            allowed=f"a stack of {model.experts} experts, at most {MOST_EXPERTS}",
        )
    return shape[1]
