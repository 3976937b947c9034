# pyright: basic
"""The signature of a compiled call, as plain data, and the conversion of a caller's arguments to its form.

spec = spec_of("forward", program)              of an exported graph
key, leaves = seen((args, kwargs))              what a call looks like, and its tensors, in one pass
order = place(spec, binder.form(...))           which of the caller's leaves goes where, or None
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, SymIntArgument
from torch.utils import _pytree as pytree

from torchwright.core import nested
from torchwright.core.errors import ArtifactError
from torchwright.optimization.engines.dispatch.spec import (
    SIZE,
    TENSOR,
    UNKNOWN,
    CallSpec,
    Parameter,
    Structure,
    TensorSpec,
)


class NotPlain(Exception):
    """A graph whose inputs no plain data describes."""


# ------------------------------------------------------------------------------------------------ of graphs


class _Leaf:
    """Stands for a tensor or a constant while a structure is taken apart."""

    def __init__(self, structure: Structure) -> None:
        self.structure = structure


def spec_of(name: str, program: ExportedProgram) -> CallSpec:
    """Return the inputs that an exported graph takes. Raises `NotPlain` for a size that is more than a number or a
    name.
    """
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    changed = written(program)
    tensors: list[TensorSpec] = []
    leaves: list[_Leaf] = []
    mutates: list[int] = []
    for spec in program.graph_signature.input_specs:
        if spec.kind is not InputKind.USER_INPUT:
            continue
        value = spec.arg.value if isinstance(spec.arg, ConstantArgument) else values[spec.arg.name]
        if isinstance(value, torch.Tensor):
            if spec.arg.name in changed:
                mutates.append(len(tensors))
            leaves.append(_Leaf({"tensor": len(tensors)}))
            tensors.append(_tensor_spec(value))
        else:
            leaves.append(_Leaf({"constant": repr(value)}))
    outputs = _outputs(program)
    used = {size for tensor in tensors for size in tensor.shape if isinstance(size, str)}
    sizes = {
        str(symbol): (max(0, int(bounds.lower)), _finite(bounds.upper))
        for symbol, bounds in program.range_constraints.items()
        if str(symbol) in used
    }
    in_spec = program.call_spec.in_spec
    assert in_spec is not None
    return CallSpec(
        name=name,
        structure=_structure(pytree.tree_unflatten(leaves, in_spec)),
        tensors=tuple(tensors),
        sizes=sizes,
        mutates=tuple(mutates),
        outputs=outputs,
        results=_results(program),
        nesting=_classes(program),
    )


def _classes(program: ExportedProgram) -> str:
    """The nesting of the results where they have classes of the model's own, else nothing."""
    out_spec = program.call_spec.out_spec
    if out_spec is None or not nested.has_records(out_spec):
        return ""
    try:
        return pytree.treespec_dumps(out_spec)
    except NotImplementedError as error:  # of another class, registered without a name for files
        raise NotPlain(str(error)) from error


def written_by(node: Any) -> list[Any]:
    """The nodes that a node of an exported graph writes to."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return []
    given = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | node.kwargs
    targets = [given.get(a.name) for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    return [leaf for leaf in pytree.tree_leaves(targets) if isinstance(leaf, fx.Node)]


def written(program: ExportedProgram) -> set[str]:
    """The placeholders, inputs and buffers, that the call changes in place.

    Graphs are kept as they were traced, with operators that change their arguments; only where there is one that may
    change a placeholder is the graph brought into the form that says so.
    """
    named = _said_to_be_written(program)
    views: dict[Any, set[str]] = {}
    found = set(named)
    for node in program.graph.nodes:
        if node.op == "placeholder":
            views[node] = {node.name}
            continue
        below = set[str]().union(*(views.get(n, set()) for n in node.all_input_nodes))
        schema = getattr(node.target, "_schema", None)
        if schema is None:  # getitem, and operators of graphs within the graph
            views[node] = below
            continue
        found |= set[str]().union(*(views.get(n, set()) for n in written_by(node)))
        views[node] = below if any(r.alias_info is not None for r in schema.returns) else set()
    if found == named:
        return named
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, about its own internals
            return _said_to_be_written(program.run_decompositions({}))
    except (
        Exception
    ):  # of torch.export, at whatever it does not know: what may be changed is taken for changed
        return found


def _said_to_be_written(program: ExportedProgram) -> set[str]:
    signature = program.graph_signature
    buffers = set(signature.buffers_to_mutate.values())
    return set(signature.user_inputs_to_mutate.values()) | {
        spec.arg.name for spec in signature.input_specs if spec.target in buffers
    }


def _results(program: ExportedProgram) -> tuple[str, ...]:
    found = []
    for spec in program.graph_signature.output_specs:
        if spec.kind is OutputKind.USER_OUTPUT and isinstance(spec.arg, ConstantArgument):
            found.append(repr(spec.arg.value))
        elif spec.kind is OutputKind.USER_OUTPUT:
            found.append(SIZE if isinstance(spec.arg, SymIntArgument) else TENSOR)
    return tuple(found) if set(found) != {TENSOR} else ()


def _outputs(program: ExportedProgram) -> tuple[TensorSpec, ...] | None:
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    found = [
        values.get(spec.arg.name)
        for spec in program.graph_signature.output_specs
        if spec.kind is OutputKind.USER_OUTPUT
    ]
    try:
        return tuple(_tensor_spec(value) for value in found if isinstance(value, torch.Tensor))
    except NotPlain:
        return None


def _tensor_spec(value: torch.Tensor) -> TensorSpec:
    shape = tuple(_size(size) for size in value.shape)
    strides = [_hint(stride) for stride in value.stride()]
    # Of equal strides (sizes of 1) the earlier dimension is the outer one.
    order = tuple(sorted(range(len(shape)), key=lambda dim: -strides[dim]))
    return TensorSpec(dtype=str(value.dtype).removeprefix("torch."), shape=shape, order=order)


def _size(size: Any) -> int | str:
    if isinstance(size, int):
        return size
    text = str(size)
    if text.isdigit():  # a symbol that turned out to be a number
        return int(text)
    if not text.isidentifier():
        raise NotPlain(f"a size of {text}")
    return text


def _hint(value: Any) -> int:
    """A number of the same magnitude as a symbolic stride."""
    if isinstance(value, int):
        return value
    expression = value.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, 64)))


def _finite(value: Any) -> int | None:
    try:
        return int(value) if int(value) < 2**62 else None
    except (TypeError, ValueError, OverflowError, AttributeError):
        return None


def _structure(value: Any) -> Structure:
    if isinstance(value, _Leaf):
        return value.structure
    if value is None:  # an empty node of its own in newer versions of pytree, a leaf in older ones
        return {"constant": "None"}
    if type(value) is nested.FlattenedInstance:
        return {"class": value.type.label, "items": [_structure(item) for item in value.values]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_structure(item) for item in value]}
    if type(value) in _DICTS:
        return {"dict": {_key(key): _structure(item) for key, item in value.items()}}
    children, name = _children(value)
    return {"class": name, "items": [_structure(item) for item in children]}


_DICTS = (dict, OrderedDict, defaultdict)
"""Their tensors are known by their keys, in whatever order these are."""


def _key(key: Any) -> str:
    """A dictionary's key as JSON allows it."""
    return key if isinstance(key, str) else f"{type(key).__name__} {key!r}"


def _children(value: Any) -> tuple[list[Any], str]:
    """Return the parts of a pytree container, and its class's name with pytree's own data, such as the names of its
    parts. A leaf is returned itself, without a name."""
    leaves, spec = pytree.tree_flatten(value, is_leaf=lambda part: part is not value)
    if spec.is_leaf():
        return leaves, ""
    kind, context = type(value), spec.context
    if context is None or context is kind:
        return leaves, kind.__qualname__
    return leaves, f"{kind.__qualname__} {re.sub(' at 0x[0-9a-f]+', '', repr(context))}"


# ------------------------------------------------------------------------------------------------- of calls

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def seen(value: Any, key: list[Any], leaves: list[torch.Tensor]) -> None:
    """Append what a nested value looks like to `key`, hashable, and its tensors to `leaves`.

    Raises `TypeError` for tensors of another class (fake, functional, sharded ones) and values that cannot be compared.
    """
    kind = type(value)
    if kind in _PLAIN:
        key.append((value.dtype, value.shape, value.stride(), value.device, value.layout, value.is_neg()))
        leaves.append(value)
    elif kind in (tuple, list):
        key.append((kind, len(value)))
        for item in value:
            seen(item, key, leaves)
    elif kind in _DICTS:
        key.append((kind, *value))
        for item in value.values():
            seen(item, key, leaves)
    elif value is None or kind in (bool, int, str):
        key.append((kind, value))
    elif kind is float:  # 0.0 and -0.0 are equal, NaN is not
        key.append((kind, repr(value)))
    elif isinstance(value, torch.Tensor) or is_array(value):
        raise TypeError(f"a {kind.__name__}")
    elif (items := nested.items_of(value)) is not None:
        key.append((kind, *items))
        for item in items.values():
            seen(item, key, leaves)
    else:
        parts, name = _children(value)
        key.append((kind, name, len(parts)) if name else (kind, repr(value)))
        for item in parts if name else ():
            seen(item, key, leaves)


def is_array(value: Any) -> bool:
    """Check for a NumPy array without importing NumPy."""
    return type(value).__module__ == "numpy" and type(value).__name__ == "ndarray"


def numbered(value: Any, counter: list[int]) -> Structure:
    """The structure of a caller's nested value; its tensors are numbered in the order in which `seen` finds them."""
    if isinstance(value, torch.Tensor):
        counter[0] += 1
        return {"tensor": counter[0] - 1}
    if type(value) in (list, tuple):
        return {type(value).__name__: [numbered(item, counter) for item in value]}
    if type(value) in _DICTS:
        return {"dict": {_key(key): numbered(item, counter) for key, item in value.items()}}
    if (record := nested.taken_apart(value)) is not None:
        return {"class": record.type.label, "items": [numbered(item, counter) for item in record.values]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"constant": repr(value)}
    parts, name = _children(value)
    if not name:
        return {"constant": repr(value)}
    return {"class": name, "items": [numbered(item, counter) for item in parts]}


class Binder:
    """Knows the parameters of the original's `forward`, so that calls by name and by position are one."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._defaults = {p.name: p.default for p in parameters}
        try:
            self._signature = inspect.Signature(
                [
                    inspect.Parameter(
                        p.name,
                        getattr(inspect.Parameter, p.kind),
                        default=inspect.Parameter.empty if p.default is None else None,
                    )
                    for p in parameters
                ]
            )
        except ValueError as error:
            raise ArtifactError("the parameters of the original are none", found=str(error)[:200]) from error

    def place(self, expected: Structure, args: Structure, kwargs: Structure) -> list[int] | None:
        """For each tensor of a compiled call, which of the caller's it is; None where this is another call.

        `expected` is of (args, kwargs), the others of what the caller gave.
        """
        order: dict[int, int] = {}
        if _match(expected, {"tuple": [args, kwargs]}, order):
            return [order[index] for index in range(len(order))]
        wanted_args, wanted_kwargs = expected["tuple"]
        wanted, given = self._named(wanted_args, wanted_kwargs), self._named(args, kwargs)
        if wanted is None or given is None:
            return None
        order = {}
        for name in wanted.keys() | given.keys():
            default: Structure = {"constant": self._defaults.get(name) or ""}
            if not _match(wanted.get(name, default), given.get(name, default), order):
                return None
        return [order[index] for index in range(len(order))]

    def _named(self, args: Structure, kwargs: Structure) -> dict[str, Structure] | None:
        try:
            bound = self._signature.bind(*args["tuple"], **kwargs["dict"])
        except TypeError:
            return None
        found = dict(bound.arguments)
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                found[name] = {"tuple": list(found.get(name, ()))}
            elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
                found[name] = {"dict": found.get(name, {})}
        return found


_CONSTANTS = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Their `repr` says all of them."""


def parameters_of(forward: Callable[..., Any]) -> tuple[Parameter, ...]:
    """The parameters of a model's `forward`; a default that is not plain matches no value but itself."""
    found = []
    for parameter in inspect.signature(forward).parameters.values():
        default = parameter.default
        plain = default is None or isinstance(default, _CONSTANTS)
        text = None if default is inspect.Parameter.empty else repr(default) if plain else UNKNOWN
        found.append(Parameter(name=parameter.name, kind=parameter.kind.name, default=text))
    return tuple(found)


def _match(expected: Structure, given: Structure, order: dict[int, int]) -> bool:
    """Check whether two structures match; records in `order` which of the given tensors stands for which expected
    one.
    """
    if expected.keys() != given.keys():
        return False
    if "tensor" in expected:
        order[expected["tensor"]] = given["tensor"]
        return True
    if "dict" in expected:
        wanted, found = expected["dict"], given["dict"]
        return wanted.keys() == found.keys() and all(_match(wanted[k], found[k], order) for k in wanted)
    if "constant" in expected:
        return expected["constant"] == given["constant"]
    kind = "items" if "class" in expected else next(iter(expected))
    if expected.get("class") != given.get("class") or len(expected[kind]) != len(given[kind]):
        return False
    return all(_match(a, b, order) for a, b in zip(expected[kind], given[kind], strict=True))
