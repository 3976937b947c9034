# pyright: basic
"""Forged ONNX files: all that protobuf's fields can say and no exporter writes."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIZES = (0, -1, 1, 7, 2**31 - 1, 2**32, 2**40, 2**62, -(2**63))
PLACES = (
    *("/etc/passwd", "../../../etc/passwd", "call-0", "../manifest.json", "", "a\0b", "x" * 10_000),
    *("file:///etc/passwd", "/dev/zero", "*/_ORT_MEM_ADDR_/*"),
)
"""Locations that a file may name for its weights. The last is ONNX Runtime's mark for an address in memory."""
LIBRARIES = (
    "com.microsoft",
    "com.microsoft.nchwc",
    "ai.onnx.ml",
    "ai.onnx.training",
    "evil",
    "a\nb",
    "x" * 10_000,
)
KINDS = (
    *("If", "Loop", "Scan", "Gemm", "Conv", "Einsum", "Resize", "StringNormalizer", "RegexFullMatch"),
    *("Optional", "SequenceAt", "Cast", "ImageDecoder", "QLinearConv", "NoSuchOperator", ""),
)
BEYOND = ("external data", "another library")
"""Changes that our own rules refuse, whatever ONNX Runtime would say of them."""


def break_model(data: bytes, chance: random.Random) -> tuple[bytes, str]:
    """Return an ONNX file with one thing changed in it, and the name of the change."""
    import onnx  # pyright: ignore[reportMissingImports]

    model = onnx.load_model_from_string(data)
    name = chance.choice(list(CHANGES))
    CHANGES[name](model, chance)
    return model.SerializeToString(), name


def _sizes(model: Any, chance: random.Random) -> None:
    """Let a weight, an input or a result have another shape."""
    tensors = list(model.graph.initializer)
    values = [*model.graph.input, *model.graph.output, *model.graph.value_info]
    if chance.random() < 0.5 and tensors:
        dims = chance.choice(tensors).dims
        if dims and chance.random() < 0.7:
            dims[chance.randrange(len(dims))] = chance.choice(SIZES)
        else:
            dims.extend([chance.choice(SIZES)] * chance.choice((1, 2, 1000)))
        return
    shape = chance.choice(values).type.tensor_type.shape
    dim = chance.choice(list(shape.dim)) if shape.dim else shape.dim.add()
    dim.dim_value = chance.choice(SIZES)


def _contents(model: Any, chance: random.Random) -> None:
    """Let a weight have other bytes than its shape and type need."""
    tensor = chance.choice(list(model.graph.initializer))
    how = chance.randrange(4)
    if how == 0:
        tensor.raw_data = tensor.raw_data[: chance.randrange(len(tensor.raw_data) + 1)]
    elif how == 1:
        tensor.raw_data += b"\xff" * chance.choice((1, 4, 100_000))
    elif how == 2:
        tensor.data_type = chance.choice((-1, 0, 1, 7, 8, 10, 16, 23, 2**31 - 1))
    else:
        tensor.ClearField("raw_data")
        tensor.int64_data.extend([2**62] * 5)


def _external(model: Any, chance: random.Random) -> None:
    """Let a tensor, wherever one may stand, lie in another file or in memory."""
    tensor = chance.choice(
        (
            lambda: chance.choice(list(model.graph.initializer)),
            lambda: model.graph.sparse_initializer.add().values,
            lambda: _constant(model.graph).attribute.add(name="value", type=4).t,
            lambda: _constant(_branch(model)).attribute.add(name="value", type=4).t,
            lambda: _constant(_function(model)).attribute.add(name="value", type=4).t,
            lambda: model.training_info.add().algorithm.initializer.add(),
        )
    )()
    tensor.data_type = tensor.data_type or 1
    tensor.ClearField("raw_data")
    tensor.data_location = 1
    tensor.external_data.add(key="location", value=chance.choice(PLACES))
    if chance.random() < 0.5:
        tensor.external_data.add(key="offset", value=str(chance.choice(SIZES)))
        tensor.external_data.add(key="length", value=str(chance.choice(SIZES)))


def _constant(holder: Any) -> Any:
    """Add a node without a value: those of a graph and of a function have one field of the same name."""
    return holder.node.add(op_type="Constant", output=["strange"])


def _branch(model: Any) -> Any:
    node = model.graph.node.add(op_type="If", input=[model.graph.input[0].name], output=["branched"])
    return node.attribute.add(name="then_branch", type=5).g


def _function(model: Any) -> Any:
    function = model.functions.add(name="strange_function", domain="pkg.torch", output=["strange"])
    function.opset_import.add(domain="", version=18)
    return function


def _library(model: Any, chance: random.Random) -> None:
    """Let an operator, wherever one may stand, be of another library."""
    domain = chance.choice(LIBRARIES)
    place = chance.randrange(4)
    if place == 0:
        chance.choice(list(model.graph.node)).domain = domain
    elif place == 1:
        _branch(model).node.add(op_type="Gelu", domain=domain, output=["strange"])
    elif place == 2:
        _function(model).node.add(op_type="Gelu", domain=domain, output=["strange"])
    else:
        _function(model).domain = domain
    if chance.random() < 0.7:
        model.opset_import.add(domain=domain, version=1)


def _nesting(model: Any, chance: random.Random) -> None:
    """Put graphs into graphs, up to more than protobuf reads."""
    graph = model.graph
    for _ in range(chance.choice((1, 5, 20, 30, 40, 200))):
        node = graph.node.add(op_type="If", input=[model.graph.input[0].name], output=["branched"])
        graph = node.attribute.add(name="then_branch", type=5).g


def _functions(model: Any, chance: random.Random) -> None:
    """Let functions call each other: in a circle, or each one twice the next."""
    depth, circle = chance.choice((1, 3, 10)), chance.random() < 0.5
    for index in range(depth):
        function = model.functions.add(name=f"f{index}", domain="pkg.torch", input=["a"], output=["c"])
        function.opset_import.add(domain="", version=18)
        function.opset_import.add(domain="pkg.torch", version=1)
        last = index == depth - 1
        called, domain = ("Abs", "") if last and not circle else (f"f{(index + 1) % depth}", "pkg.torch")
        function.node.add(op_type=called, domain=domain, input=["a"], output=["b"])
        function.node.add(op_type=called, domain=domain, input=["b"], output=["c"])
    model.opset_import.add(domain="pkg.torch", version=1)
    node = chance.choice(list(model.graph.node))
    del node.input[1:]
    node.op_type, node.domain = "f0", "pkg.torch"


def _huge(model: Any, chance: random.Random) -> None:
    """Let a node compute a tensor of up to 2**62 values from a few bytes."""
    size = chance.choice((2**31, 2**40, 2**62, -5))
    sizes = [[size], [2**20, 2**20], [2**31, 2**31, 2**31]][chance.randrange(3)]
    shape = model.graph.initializer.add(name="sizes", data_type=7, dims=[len(sizes)])
    shape.int64_data.extend(sizes)
    node = chance.choice(list(model.graph.node))
    taken = list(node.input) or ["sizes"]
    kind = chance.choice(("ConstantOfShape", "Expand", "Tile", "Reshape"))
    inputs = ["sizes"] if kind == "ConstantOfShape" else [taken[0], "sizes"]
    _first(model.graph, op_type=kind, input=inputs, output=["enormous"])
    del node.input[:]
    node.input.extend(["enormous", *taken[1:]])


def _first(graph: Any, **fields: Any) -> None:
    """Put a node in front of the others, which ONNX wants in the order of their computation."""
    others = list(graph.node)
    del graph.node[:]
    graph.node.add(**fields)
    graph.node.extend(others)


def _wiring(model: Any, chance: random.Random) -> None:
    """Let a node read another value: a later one, itself, or none that there is."""
    nodes = [node for node in model.graph.node if node.input]
    node = chance.choice(nodes)
    outputs = [name for other in model.graph.node for name in other.output]
    node.input[chance.randrange(len(node.input))] = chance.choice((*outputs, "nowhere", ""))


def _attributes(model: Any, chance: random.Random) -> None:
    """Let an attribute have another number, type or name, or a node one that it does not know."""
    node = chance.choice(list(model.graph.node))
    attribute = chance.choice(list(node.attribute)) if node.attribute else node.attribute.add(name="axis")
    how = chance.randrange(3)
    if how == 0:
        attribute.type, attribute.i = 2, chance.choice(SIZES)
        attribute.ints.extend([chance.choice(SIZES)] * chance.choice((1, 3, 10_000)))
    elif how == 1:
        attribute.type = chance.randrange(15)
    else:
        attribute.name = chance.choice(("axis", "perm", "to", "body", "", "x" * 10_000))


def _names(model: Any, chance: random.Random) -> None:
    fields = [*model.graph.initializer, *model.graph.input, *model.graph.output, *model.graph.node]
    one = chance.choice(fields)
    one.name = chance.choice(("", "x" * 100_000, "../a", "a\0b", chance.choice(fields).name))


def _kinds(model: Any, chance: random.Random) -> None:
    chance.choice(list(model.graph.node)).op_type = chance.choice(KINDS)


def _versions(model: Any, chance: random.Random) -> None:
    if chance.random() < 0.5:
        model.ir_version = chance.choice((0, -1, 3, 2**31, 2**62))
    else:
        chance.choice(list(model.opset_import)).version = chance.choice((0, -1, 1, 7, 99, 2**62))


def _many(model: Any, chance: random.Random) -> None:
    """Repeat a part of the graph thousands of times."""
    field = chance.choice(("node", "initializer", "input", "output", "value_info"))
    parts = getattr(model.graph, field)
    if parts:
        parts.extend([chance.choice(list(parts))] * chance.choice((1, 100, 5_000)))


def _less(model: Any, chance: random.Random) -> None:
    field = chance.choice(("node", "initializer", "input", "output"))
    parts = getattr(model.graph, field)
    if parts:
        del parts[chance.randrange(len(parts))]


CHANGES: dict[str, Callable[[Any, random.Random], None]] = {
    "sizes": _sizes,
    "contents": _contents,
    "external data": _external,
    "another library": _library,
    "nesting": _nesting,
    "functions": _functions,
    "huge tensors": _huge,
    "wiring": _wiring,
    "attributes": _attributes,
    "names": _names,
    "kinds": _kinds,
    "versions": _versions,
    "repetition": _many,
    "omission": _less,
}


def is_onnx(path: Path) -> bool:
    """Check for the file that an artifact keeps for ONNX Runtime, whose name has no suffix."""
    return path.is_file() and path.parent.name == "onnxruntime" and path.suffix == ""
