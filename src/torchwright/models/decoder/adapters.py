"""Adapters of peft as a decoder computes with them for single requests: read, checked, fused and packed."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from torchwright.core.errors import ModelError
from torchwright.hardware.kernels import ops
from torchwright.hardware.kernels.cpu.memory import lasting
from torchwright.hardware.kernels.pack import BLOCK
from torchwright.hardware.kernels.pack_low_rank import Segment, pack_low_rank
from torchwright.hub.adapter import AdapterFile
from torchwright.hub.folder import find_object
from torchwright.models.decoder.attention import PagedAttention
from torchwright.models.decoder.families import FAMILIES
from torchwright.models.decoder.feed_forward import GatedFeedForward
from torchwright.models.decoder.layers import Layer
from torchwright.models.decoder.low_rank import PARTS, Adapter, Pair, place_of
from torchwright.models.decoder.model import Decoder
from torchwright.models.decoder.paged_model import PagedModel
from torchwright.models.decoder.weight_rows import linear_rows, row_order

MOST_BYTES = 2**32
"""Bytes of an adapter's file: rank 128 on every layer of a model of 70 billion parameters takes 3.3 GB in float32."""
ADAPTED = "the projections of attention (q, k, v, o) and of dense feed-forward blocks (gate, up, down)"


def read_adapter(
    adapter: Path, decoder: PagedModel, folder: Path, *, most_bytes: int = MOST_BYTES
) -> Adapter:
    """Return the LoRA of a folder of peft's for a decoder, whose own weights, in `folder`, stay as they are.

    The weights may be quantized. Raises `ModelError`, naming the file, for DoRA, other layers than `ADAPTED`, shapes
    that do not fit, and a file of more than `most_bytes`.
    """
    if not isinstance(decoder, Decoder):
        raise ModelError(
            f"the adapter {adapter} cannot be added to requests of {folder}",
            found="a model that does not run on Torchwright's own decoder",
        )
    if decoder.ways > 1:
        raise ModelError(
            f"the adapter {adapter} cannot be added to requests of a model that {decoder.ways} processes divide",
            found="layers of which each process has a part",
            next="load_decoder(…, adapter=FOLDER) adds it to the weights as they are read",
        )
    files = AdapterFile(adapter, find_object(folder / "config.json").get("model_type"), most_bytes=most_bytes)
    dtype, device = decoder.embedding.dtype, decoder.embedding.device
    native: Any = None
    if dtype == torch.bfloat16 and ops.on(device, dtype) is ops.native:
        native = torch.classes.torchwright.Adapter()
    digest, pairs = hashlib.sha256(str(dtype).encode()), dict[int, Pair]()
    packed: list[tuple[int, torch.Tensor, torch.Tensor, int, int, list[int]]] = []
    for layer, module in enumerate(decoder.layers):
        for part in _parts(module):
            fused = _fused(files, decoder, layer, part)
            if fused is None:
                continue
            place = place_of(layer, part)
            pair, segments = fused
            pair = Pair(pair.a_RK.to(dtype), pair.b_NR.to(dtype))
            digest.update(f"{place} {[*pair.a_RK.shape]} {[*pair.b_NR.shape]};".encode())
            for matrix in pair:
                digest.update(matrix.view(torch.uint8).numpy().data)
            if native is None:
                pairs[place] = Pair(*(matrix.to(device) for matrix in pair))
            else:
                a, b, runs = pack_low_rank(*pair, segments)
                packed.append((place, a, b, pair.a_RK.shape[1], len(pair.b_NR), runs))
    files.finish(ADAPTED)
    size = sum(matrix.nbytes for pair in pairs.values() for matrix in pair)
    if native is not None:
        # One block of memory, in huge pages, in the order of a step.
        memory = lasting(torch.cat([matrix.flatten() for _, a, b, *_ in packed for matrix in (a, b)]))
        size, rest = (
            memory.nbytes,
            iter(memory.split([one.numel() for _, a, b, *_ in packed for one in (a, b)])),
        )
        for place, _, _, *form in packed:
            native.add(place, next(rest), next(rest), *form)
    return Adapter(digest.hexdigest(), size, pairs, native)


def _parts(module: torch.nn.Module) -> list[str]:
    """The linear layers of a decoder layer that are adapted row by row."""
    if not isinstance(module, Layer):
        return []
    attention, mlp = isinstance(module.attention, PagedAttention), isinstance(module.mlp, GatedFeedForward)
    return [*(PARTS[:2] if attention else ()), *(PARTS[2:] if mlp else ())]


def _fused(files: AdapterFile, decoder: Decoder, layer: int, part: str) -> tuple[Pair, list[Segment]] | None:
    """The matrices of a linear layer, which may be several in the file: A's one below the other, B's in blocks."""
    config = decoder.config
    rows = linear_rows(config, FAMILIES[config.architecture].names, part)
    counts = rows.counts if len(rows.names) > 1 else (sum(rows.counts),)
    pairs = [
        files.take(f"model.layers.{layer}.{name}.weight", (count, rows.columns))
        for name, count in zip(rows.names, counts, strict=True)
    ]
    if not any(pairs):
        return None
    # Two ranks are one word of the kernels.
    ranks = [0 if pair is None else len(pair[0]) + len(pair[0]) % 2 for pair in pairs]
    a_RK, b_NR = torch.zeros(sum(ranks), rows.columns), torch.zeros(sum(counts), sum(ranks))
    segments: list[Segment] = []
    feature = first = 0
    for pair, count, rank in zip(pairs, counts, ranks, strict=True):
        if pair is not None:
            own = len(pair[0])
            a_RK[first : first + own] = pair[0]
            b_NR[feature : feature + count, first : first + own] = pair[1]
        feature += count
        segments.append((feature, first, rank))
        first += rank
    order_N = row_order(config, layer, part, len(rows.names))
    if order_N is not None:
        b_NR = b_NR[order_N]
    if order_N is not None or any(end % BLOCK for end, *_ in segments[:-1]):
        segments = [(feature, 0, first)]
    return Pair(a_RK, b_NR), segments
