"""Operations on each element, along an axis, and over axes, on parts."""

from __future__ import annotations

from torch.fx import Node

from torchwright.train.sequence.collectives import token_mean
from torchwright.train.sequence.decision import Call, Decision, Refused, axis, shape
from torchwright.train.sequence.placement import PARTIAL, WHOLE, Placement, Shard

MEAN, SUM = 1, 2
"""Values of `reduction` in ATen's losses."""


def pointwise(call: Call) -> Decision:
    """Each element of the result from the elements at its place."""
    rank = len(shape(call.node))
    operands = call.node.all_input_nodes
    first = call.divided()[0]
    place = call.place(first)
    assert isinstance(place, Shard)
    wanted = place.at(place.dim + rank - len(shape(first)))
    inputs: dict[Node, Placement] = {}
    for operand in operands:
        inputs |= call.fit(operand, wanted, rank)
    return Decision(wanted, inputs)


def cast(call: Call) -> Decision:
    """Another dtype or device; an operand that says which may be divided as it likes."""
    return Decision(call.place(call["self"]))


def elementwise_loss(call: Call) -> Decision:
    """Losses such as `mse_loss`: a value for each element, and their mean or sum."""
    operands = [each for each in (call["self"], call["target"], call.get("weight")) if isinstance(each, Node)]
    rank = max(len(shape(each)) for each in operands)
    place = call.place(call.divided()[0])
    assert isinstance(place, Shard)
    inputs: dict[Node, Placement] = {}
    for operand in operands:
        inputs |= call.fit(operand, place, rank)
    reduction = call["reduction"]
    if reduction not in (MEAN, SUM):
        return Decision(place, inputs)
    return Decision(PARTIAL, inputs, scale=1 / call.ways if reduction == MEAN else None)


def token_loss(call: Call) -> Decision:
    """`cross_entropy_loss` and `nll_loss`: scores (N, C), (N, C, …) or (C,), labels without C."""
    scores, labels, weight = call["self"], call["target"], call["weight"]
    if len(shape(scores)) == len(shape(labels)):
        raise Refused("its labels are probabilities, and their weights cannot be counted")
    place = call.place(scores)
    if isinstance(place, Shard):
        if place.dim == 1:
            raise Refused("the classes are divided")
        of_labels = place.at(max(place.dim - 1, 0))
    else:
        of_labels = call.place(labels)
        assert isinstance(of_labels, Shard)
        place = of_labels.at(of_labels.dim + (of_labels.dim > 0))
    inputs: dict[Node, Placement] = {scores: place, labels: of_labels}
    if call["reduction"] == MEAN:
        kind = "cross_entropy" if "cross_entropy" in str(call.node.target) else "nll_loss"
        smoothing = call.get("label_smoothing", 0.0)
        told = (kind, scores, labels, weight, call["ignore_index"], smoothing, call.group)
        return Decision(PARTIAL, inputs, call=(token_mean, told))
    return Decision(PARTIAL if call["reduction"] == SUM else of_labels, inputs)


def along(call: Call) -> Decision:
    """Operations that mix along one axis and keep it: softmax, sort, cumsum and their like."""
    x, place = call.only(_operand(call))
    given = call.get("dim", call.get("dims"))
    dims = [given] if isinstance(given, int) else given
    if dims is None or place.dim in [axis(dim, len(shape(x))) for dim in dims]:
        raise Refused("it mixes tokens along the sequence")
    return Decision(place)


def normalization(call: Call) -> Decision:
    """`layer_norm` and `rms_norm`, over the last axes."""
    x, place = call.only("input")
    if place.dim >= len(shape(x)) - len(call["normalized_shape"]):
        raise Refused("it normalizes over the divided axis")
    return Decision(place)


def total(call: Call) -> Decision:
    return _reduction(call, Decision(PARTIAL))


def mean(call: Call) -> Decision:
    return _reduction(call, Decision(PARTIAL, scale=1 / call.ways))


def over(call: Call) -> Decision:
    """Reductions whose parts cannot be added: maxima, variances, norms."""
    return _reduction(call, None)


def same_shape_whole(call: Call) -> Decision:
    """Factories such as `new_zeros`: a divided operand gives its dtype and device only."""
    return Decision(WHOLE)


def _reduction(call: Call, across: Decision | None) -> Decision:
    x, place = call.only("self")
    rank = len(shape(x))
    given = call.get("dim")
    dims = [given] if isinstance(given, int) else given
    dims = [axis(dim, rank) for dim in dims] if dims else list(range(rank))
    if place.dim in dims:
        if across is None:
            raise Refused("it reduces the sequence, and its parts cannot be added")
        return across
    kept = call.get("keepdim", False)
    return Decision(place if kept else place.at(place.dim - sum(dim < place.dim for dim in dims)))


def _operand(call: Call) -> str:
    return "input" if call.get("input") is not None else "self"
