"""Operations that move, cut or join axes, on parts."""

from __future__ import annotations

import torch
from torch.fx import Node

from torchwright.train.sequence.collectives import selected
from torchwright.train.sequence.decision import Call, Decision, Refused, axis, shape
from torchwright.train.sequence.placement import PARTIAL, WHOLE, Placement, Shard, local_shape, reshaped


def reshape(call: Call) -> Decision:
    """Everything that keeps the order of elements; by shapes, as a part's axis may have become 1."""
    x, place = call.only("self")
    new = shape(call.node)
    if call.node.meta["val"].dtype != x.meta["val"].dtype:
        raise Refused("it reads the same bytes as another dtype")
    found = reshaped(place, shape(x), new, call.ways)
    if found is None:
        raise Refused(
            f"a reshape from {list(shape(x))} to {list(new)} cuts across the divided axis {place.dim}"
        )
    sizes = local_shape(new, found, call.ways)
    return Decision(found, call=(torch.ops.aten.reshape.default, (x, sizes)))


def transpose(call: Call) -> Decision:
    x, place = call.only("self")
    one, other = (axis(call[name], len(shape(x))) for name in ("dim0", "dim1"))
    return Decision(place.at({one: other, other: one}.get(place.dim, place.dim)))


def permute(call: Call) -> Decision:
    x, place = call.only("self")
    return Decision(place.at([axis(dim, len(shape(x))) for dim in call["dims"]].index(place.dim)))


def transpose_matrix(call: Call) -> Decision:
    _, place = call.only("self")
    return Decision(place.at(1 - place.dim))


def expand(call: Call) -> Decision:
    x, place = call.only("self")
    new = shape(call.node)
    found = place.at(place.dim + len(new) - len(shape(x)))
    return Decision(found, changes={"size": local_shape(new, found, call.ways)})


def repeat(call: Call) -> Decision:
    x, place = call.only("self")
    dim = place.dim + len(call["repeats"]) - len(shape(x))
    if call["repeats"][dim] != 1:
        raise Refused("it repeats the divided axis")
    return Decision(place.at(dim))


def repeat_interleave(call: Call) -> Decision:
    x, place = call.only("self")
    if call["dim"] is None or axis(call["dim"], len(shape(x))) == place.dim:
        raise Refused("it repeats the divided axis")
    return Decision(place)


def select(call: Call) -> Decision:
    x, place = call.only("self")
    dim = axis(call["dim"], len(shape(x)))
    if dim != place.dim:
        return Decision(place.at(place.dim - (dim < place.dim)))
    if place.outer != 1:
        raise Refused("it takes one place of an axis of several divided runs")
    return Decision(PARTIAL, call=(selected, (x, dim, call["index"], call.group)))


def cut(call: Call) -> Decision:
    """`slice`, `narrow` and the `split` family: free along other axes than the divided one."""
    x, place = call.only("self")
    result = call.node.meta["val"]
    if axis(call["dim"], len(shape(x))) != place.dim:
        return Decision(place)
    if isinstance(result, torch.Tensor) and result.shape == shape(x):
        return Decision(place)
    raise Refused(
        "it cuts the divided axis; labels shifted by padding (ignored places at the end) need no cut logits"
    )


def unbind(call: Call) -> Decision:
    x, place = call.only("self")
    dim = axis(call["dim"], len(shape(x)))
    if dim == place.dim:
        raise Refused("it takes the divided axis apart")
    return Decision(place.at(place.dim - (dim < place.dim)))


def cat(call: Call) -> Decision:
    # A cache that is still empty is joined to the first keys.
    operands = [each for each in call["tensors"] if shape(each) != (0,)]
    rank = len(shape(operands[0]))
    place = _one_division(call, operands)
    if axis(call["dim"], rank) == place.dim and len(operands) > 1:
        raise Refused("it lengthens the divided axis")
    return Decision(place, dict.fromkeys(operands, place), changes={"tensors": operands})


def stack(call: Call) -> Decision:
    operands = call["tensors"]
    place = _one_division(call, operands)
    dim = axis(call["dim"], len(shape(operands[0])) + 1)
    return Decision(place.at(place.dim + (dim <= place.dim)), dict.fromkeys(operands, place))


def pad(call: Call) -> Decision:
    x, place = call.only("self")
    from_end = 2 * (len(shape(x)) - 1 - place.dim)
    if any(call["pad"][from_end : from_end + 2]):
        raise Refused("it pads the divided axis")
    return Decision(place)


def index(call: Call) -> Decision:
    """A whole table looked up by divided places; everything else that indexing can do is refused."""
    x, indices = call["self"], call["indices"]
    (at,) = [place for place, each in enumerate(indices) if each is not None] if _one(indices) else [-1]
    if at < 0 or isinstance(call.place(x), Shard):
        raise Refused("it indexes divided tokens")
    place = call.place(indices[at])
    assert isinstance(place, Shard)
    return Decision(place.at(at + place.dim))


def embedding(call: Call) -> Decision:
    indices = call["indices"]
    if call["scale_grad_by_freq"] or call["sparse"]:
        raise Refused("its gradient is sparse, or depends on how often a token is in the whole batch")
    place = call.place(indices)
    if place == WHOLE:
        # One place for each token: here tokens become vectors, and their division begins.
        sizes = shape(indices)
        if len(sizes) > 2 or sizes.count(call.length) != 1:
            return Decision(WHOLE)
        place = Shard(sizes.index(call.length))
    return Decision(place, {indices: place})


def gather(call: Call) -> Decision:
    operands = [each for each in (call["self"], call["index"], call.get("src")) if isinstance(each, Node)]
    place = _one_division(call, operands)
    if axis(call["dim"], len(shape(call["self"]))) == place.dim:
        raise Refused("it gathers along the divided axis")
    if len({shape(each)[place.dim] for each in operands}) > 1:
        raise Refused("it gathers for some of the tokens")
    wanted: dict[Node, Placement] = dict.fromkeys(operands, place)
    return Decision(place, wanted)


def one_hot(call: Call) -> Decision:
    _, place = call.only("self")
    if call["num_classes"] < 0:
        raise Refused("the number of classes depends on the tokens; give num_classes")
    return Decision(place)


def _one_division(call: Call, operands: list[Node]) -> Shard:
    places = {place for each in operands if isinstance(place := call.place(each), Shard)}
    if len(places) != 1:
        raise Refused("operands are divided over different axes")
    return places.pop()


def _one(indices: list[Node | None]) -> bool:
    return sum(each is not None for each in indices) == 1
