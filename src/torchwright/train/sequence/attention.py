"""Attention and the other products of matrices, on parts.

Outside attention a process has some tokens of all heads, inside it all tokens of some heads (Ulysses: Jacobs et al.,
2023).
"""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Node

from torchwright.train.sequence.decision import Call, Decision, Refused, shape
from torchwright.train.sequence.placement import PARTIAL, Placement, Shard


def fused_attention(call: Call) -> Decision:
    """`scaled_dot_product_attention`: (…, H, T, D) for queries, (…, K, S, D) for keys and values."""
    q, k, v, mask = call["query"], call["key"], call["value"], call["attn_mask"]
    rank = len(shape(q))
    tokens = Shard(rank - 2)
    places = {call.place(each) for each in (q, k, v)}
    inside = next((place for place in places if isinstance(place, Shard) and place.dim < rank - 2), None)
    if inside is None and tokens not in places:
        raise Refused("queries, keys and values are divided neither over tokens nor over heads")
    dim = inside.dim if inside else head_axis(call, shape(q), rank - 2)
    repeat = {}
    if call["enable_gqa"] and dim == rank - 3 and shape(k)[dim] % call.ways:
        # Too few key-value heads for the processes: each query head brings its own.
        repeat = {each: (dim, shape(q)[dim] // shape(each)[dim]) for each in (k, v)}
    heads = inside or Shard(dim)
    return Decision(
        output=heads,
        inputs={q: heads, k: heads, v: heads} | call.fit(mask, heads, rank),
        then=None if inside else tokens,
        repeat=repeat,
        attention="" if inside else _message(call, shape(q), dim),
    )


def matmul(call: Call) -> Decision:
    """`matmul`, `mm` and `bmm`: (…, M, K) by (…, K, N)."""
    return _product(call, call["self"], call.get("mat2") or call["other"])


def added_matmul(call: Call) -> Decision:
    """`addmm` and `baddbmm`: a product onto which something is added."""
    left, right = (call.get(f"mat{place}") or call[f"batch{place}"] for place in (1, 2))
    decision = _product(call, left, right)
    if not isinstance(decision.output, Shard):
        raise Refused("something is added to a product that sums over divided tokens")
    fitted = call.fit(call["self"], decision.output, len(shape(call.node)))
    return replace(decision, inputs={**decision.inputs, **fitted})


def linear(call: Call) -> Decision:
    x, place = call.only("input")
    if place.dim == len(shape(x)) - 1:
        raise Refused("the features that it sums over are divided")
    return Decision(place)


def _product(call: Call, left: Node, right: Node) -> Decision:
    sizes = shape(call.node)
    rank = len(sizes)
    if min(len(shape(left)), len(shape(right))) < 2:
        raise Refused("it is a product with a vector")
    one, other = call.place(left), call.place(right)
    # Axes as the result numbers them; of the axis that is summed over, the operand has the last or the last but one.
    at_left = one.dim + rank - len(shape(left)) if isinstance(one, Shard) else None
    at_right = other.dim + rank - len(shape(right)) if isinstance(other, Shard) else None
    rows, last = rank - 2, rank - 1
    for at, place in ((at_left, one), (at_right, other)):
        if at is not None and at < rows:
            assert isinstance(place, Shard)
            heads = place.at(at)
            back = Shard(rows) if at_left == at and at_right == rows else None
            return Decision(heads, _inside(call, heads, left, right), then=back)
    if at_left == rows and at_right is not None:
        # Every query meets every key, or every row of weights all values.
        heads = Shard(head_axis(call, sizes, rows))
        message = _message(call, sizes, heads.dim) if at_right == last else ""
        back = Shard(rows) if at_right == rows else None
        return Decision(heads, _inside(call, heads, left, right), then=back, attention=message)
    if at_left == rows or (at_right == last and at_left is None):
        place = one if at_left == rows else other
        assert isinstance(place, Shard)
        return Decision(place.at(rows if at_left == rows else last))
    if at_right == last:
        raise Refused("it sums over one divided axis and keeps another")
    summed = one if isinstance(one, Shard) else other
    assert isinstance(summed, Shard)
    parts = {left: summed.at(len(shape(left)) - 1), right: summed.at(len(shape(right)) - 2)}
    return Decision(PARTIAL, parts)


def _inside(call: Call, heads: Shard, *operands: Node) -> dict[Node, Placement]:
    """Both operands divided over a leading axis, wherever they were."""
    found: dict[Node, Placement] = {}
    for operand in operands:
        sizes = shape(operand)
        dim = heads.dim - (len(shape(call.node)) - len(sizes))
        if dim >= 0 and sizes[dim] > 1:
            found[operand] = heads.at(dim)
        elif isinstance(call.place(operand), Shard):
            raise Refused("one of its operands has divided tokens and no heads")
    return found


def head_axis(call: Call, sizes: tuple[int, ...], leading: int) -> int:
    """The last leading axis that the processes can share: heads, or rows of the batch where heads do not divide."""
    for dim in reversed(range(leading)):
        if sizes[dim] % call.ways == 0:
            return dim
    axes = " x ".join(map(str, sizes[:leading])) or "none"
    raise Refused(f"{call.ways} processes divide none of its leading axes (batch, heads: {axes})")


def _message(call: Call, sizes: tuple[int, ...], dim: int) -> str:
    over = "heads" if dim == len(sizes) - 3 else "rows of the batch"
    return f"{sizes[dim] // call.ways} of {sizes[dim]} {over}"
