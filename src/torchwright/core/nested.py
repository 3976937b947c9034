# pyright: basic
"""Nested values of a call by PyTorch's pytree, with dataclasses, named tuples and enum members taken apart.

pytree takes a dataclass for one leaf unless its class is registered, and can write neither a dataclass nor a named
tuple to a file; torch.export refuses a member of an Enum. Here an instance becomes a `FlattenedInstance`: its values,
and its class by name. No class of a user's is registered, so nothing outlasts a call.

    leaves, spec = flatten((args, kwargs))      # as pytree.tree_flatten
    args, kwargs = unflatten(leaves, spec)      # instances of the caller's own classes
    opened(value), closed(value)                # instances to records, and back
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import functools
import json
import keyword
import sys
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Literal, get_args

import torch
from torch.utils import _pytree as pytree

from torchwright.core.errors import StandIn
from torchwright.core.json_file import parse_json

Form = Literal["dataclass", "mapping", "tuple", "enum"]
"""A `mapping` is a dataclass that is a dict as well, such as transformers' `ModelOutput`; a `tuple` a named tuple.

A member of an Enum has one field, its name, with the value None: other members are other structures.
"""
SERIALIZED = "torchwright.Record"
"""The name of a record in pytree's JSON."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordType:
    """The class of a record, by name."""

    form: Form
    module: str
    name: str
    """Qualified, without the module."""
    fields: tuple[str, ...]
    """Names of one instance: a mapping leaves out None, a dataclass may have further attributes."""
    cls: type | None = dataclasses.field(default=None, compare=False, repr=False)
    """None where the names come from a file."""

    @property
    def label(self) -> str:
        """The class and its fields, without the module: a script's `__main__` is another module elsewhere."""
        return f"{self.name}({', '.join(self.fields)})"


class FlattenedInstance:
    """An instance of a dataclass or named tuple, taken apart; a container that pytree knows."""

    __slots__ = ("type", "values")

    def __init__(self, kind: RecordType, values: Iterable[Any]) -> None:
        self.type, self.values = kind, tuple(values)


# ------------------------------------------------------------------------------------------ pytree's functions


def flatten(value: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the leaves of a nested value, and its structure."""
    stop = _is_instance if is_leaf is None else lambda part: is_leaf(part) or _is_instance(part)
    found, spec = pytree.tree_flatten(value, is_leaf=stop)
    if any(map(_is_instance, found)):
        return pytree.tree_flatten(opened(value), is_leaf=is_leaf)
    return found, spec


def unflatten(leaves: Iterable[Any], spec: pytree.TreeSpec) -> Any:
    """Return the nested value of this structure."""
    value = pytree.tree_unflatten(leaves, spec)
    return closed(value) if has_records(spec) else value


def leaves(value: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """Return the leaves of a nested value."""
    return flatten(value, is_leaf)[0]


def map_leaves(
    change: Callable[..., Any], value: Any, *rest: Any, is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """Return the nested value with every leaf changed; `rest` are values of the same structure."""
    found, spec = flatten(value, is_leaf)
    others = [spec.flatten_up_to(opened(other)) for other in rest]
    return unflatten(map(change, found, *others), spec)


def map_tensors(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return the nested value with every tensor changed."""
    return map_leaves(lambda leaf: change(leaf) if isinstance(leaf, torch.Tensor) else leaf, value)


def tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a nested value."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


# ------------------------------------------------------------------------------------------------- to records


def opened(value: Any) -> Any:
    """Return a nested value with records in place of dataclass instances and named tuples."""
    if not any(map(_is_instance, pytree.tree_leaves(value, is_leaf=_is_instance))):
        return value
    return pytree.tree_map(_opened, value, is_leaf=_is_instance)


def taken_apart(value: Any) -> FlattenedInstance | None:
    """Return a dataclass instance or named tuple as a record, its values as they are; None for anything else.

    A record is returned as it is.
    """
    cls = type(value)
    if cls is FlattenedInstance:
        return value
    form, found = form_of(cls), items_of(value)
    if form is None or found is None:
        return None
    name = RecordType(form=form, module=cls.__module__, name=cls.__qualname__, fields=tuple(found), cls=cls)
    return FlattenedInstance(name, found.values())


def items_of(value: Any) -> dict[str, Any] | None:
    """Return the values of a dataclass instance, named tuple or record by name; None for anything else."""
    cls = type(value)
    if cls is FlattenedInstance:
        return dict(zip(value.type.fields, value.values, strict=True))
    match form_of(cls):
        case "tuple":
            return dict(zip(_tuple_fields(cls) or (), value, strict=True))
        case "mapping":
            return dict(value.items())
        case "dataclass":
            return _attributes(value)
        case "enum":
            return {value.name: None}
        case None:
            return None


def form_of(cls: type) -> Form | None:
    """Return the form of instances of `cls`, or None where they are not taken apart."""
    if issubclass(cls, tuple):
        return None if cls is tuple or _tuple_fields(cls) is None else "tuple"
    if issubclass(cls, enum.Enum):  # several flags together have no name
        return None if issubclass(cls, enum.Flag) or cls in pytree.SUPPORTED_NODES else "enum"
    if issubclass(cls, _NamedValues):
        return "mapping"
    if not hasattr(cls, "__dataclass_fields__"):
        return None
    if issubclass(cls, (torch.Tensor, torch.nn.Module)):
        return None
    if issubclass(cls, dict):
        return "mapping"
    node = pytree.SUPPORTED_NODES.get(cls)
    # A class registered with a flattening of its own keeps that; `register_dataclass` brings pytree's.
    return "dataclass" if node is None or node.flatten_fn.__module__ == pytree.__name__ else None


def _is_instance(value: Any) -> bool:
    form = form_of(type(value))
    return form is not None and (form != "enum" or _is_field(value.name))


def _opened(value: Any) -> Any:
    record = taken_apart(value)
    return value if record is None else FlattenedInstance(record.type, map(opened, record.values))


def _tuple_fields(cls: type) -> tuple[str, ...] | None:
    """The names of a named tuple's values, or of C's form of one (`torch.return_types`)."""
    names = getattr(cls, "__match_args__" if hasattr(cls, "n_sequence_fields") else "_fields", None)
    return names if isinstance(names, tuple) and all(isinstance(name, str) for name in names) else None


def _attributes(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass instance, then the attributes that its `__post_init__` has set.

    A field that was never set has no value, and a cached property is left out.
    """
    cls = type(value)
    names = [field.name for field in dataclasses.fields(value)]
    found = {name: getattr(value, name) for name in names if hasattr(value, name)}
    for name, each in getattr(value, "__dict__", {}).items():
        cached = isinstance(getattr(cls, name, None), functools.cached_property)
        if name not in found and not name.startswith("__") and not cached:
            found[name] = each
    return found


# ----------------------------------------------------------------------------------------------- from records


def closed(value: Any, *, stand_ins: bool = True) -> Any:
    """Return a nested value with instances of the original classes in place of records.

    Without `stand_ins` a record stays one where its class is not imported.
    """
    if type(value) is torch.Tensor:
        return value
    if not any(map(_is_record, pytree.tree_leaves(value, is_leaf=_is_record))):
        return value

    def part(value: Any) -> Any:
        if not _is_record(value):
            return value
        values = [closed(each, stand_ins=stand_ins) for each in value.values]
        if not stand_ins and class_of(value.type) is None:
            return FlattenedInstance(value.type, values)
        return rebuilt(value.type, values)

    return pytree.tree_map(part, value, is_leaf=_is_record)


def rebuilt(kind: RecordType, values: Sequence[Any]) -> Any:
    """Return an instance with these values, without calling its constructor.

    The class is the one that was taken apart, or one that this process has imported already; a module that a file
    names is never imported. Without such a class the instance is of a stand-in with the same fields, and a `StandIn`
    warning says so once.
    """
    cls = class_of(kind) or _stand_in(kind)
    if kind.form == "enum":
        members: Any = cls
        return members[kind.fields[0]]
    if kind.form == "tuple":
        structure: Any = cls
        return structure(values) if hasattr(cls, "n_sequence_fields") else tuple.__new__(structure, values)
    given = dict(zip(kind.fields, values, strict=True))
    if kind.form == "mapping":
        return _mapping(cls, given)
    instance = object.__new__(cls)
    for name, value in given.items():
        object.__setattr__(instance, name, value)
    return instance


def _mapping(cls: type, given: dict[str, Any]) -> Any:
    """Build a dataclass that is also a dict: given values are items and attributes, all other fields None."""
    kind: Any = collections.OrderedDict if issubclass(cls, collections.OrderedDict) else dict
    instance = kind.__new__(cls)
    for field in getattr(cls, "__dataclass_fields__", ()):
        object.__setattr__(instance, field, None)
    for name, value in given.items():
        kind.__setitem__(instance, name, value)
        object.__setattr__(instance, name, value)
    return instance


def plain(value: Any) -> Any:
    """Return a nested value with dicts and tuples in place of records, for runtimes that do not know records."""

    def part(value: Any) -> Any:
        if not isinstance(value, FlattenedInstance):
            return value
        inner = [plain(each) for each in value.values]
        return (
            tuple(inner) if value.type.form == "tuple" else dict(zip(value.type.fields, inner, strict=True))
        )

    return pytree.tree_map(part, value, is_leaf=_is_record)


def plain_spec(spec: pytree.TreeSpec) -> pytree.TreeSpec:
    """Return the structure with dicts and tuples in place of records."""
    return pytree.tree_structure(plain(pytree.tree_unflatten(range(spec.num_leaves), spec)))


def has_records(spec: pytree.TreeSpec) -> bool:
    """Check whether a structure has records."""
    return spec.type is FlattenedInstance or any(map(has_records, spec.children()))


def _is_record(value: Any) -> bool:
    return type(value) is FlattenedInstance


def class_of(kind: RecordType) -> type | None:
    """Return the class of a record: the one taken apart, or one of its names and fields that is imported already."""
    if kind.cls is not None:
        return kind.cls
    for module in (kind.module, "__main__"):
        found: Any = sys.modules.get(module)
        for part in kind.name.split("."):
            # Not `getattr`: a module may import others to answer it.
            found = getattr(found, "__dict__", {}).get(part)
        if isinstance(found, type) and form_of(found) == kind.form and _has_fields(found, kind):
            return None if hasattr(found, "__del__") else found  # which would act on what a file says
    return None


def _has_fields(cls: type, kind: RecordType) -> bool:
    if kind.form == "tuple":
        return _tuple_fields(cls) == kind.fields
    if kind.form == "enum":
        return len(kind.fields) == 1 and kind.fields[0] in getattr(cls, "__members__", ())
    declared = {field.name for field in dataclasses.fields(cls)}
    return declared >= set(kind.fields) if kind.form == "mapping" else declared <= set(kind.fields)


class _NamedValues(dict[str, Any]):
    """Stands in for a dataclass that is a dict as well, and is taken apart as one."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@functools.lru_cache(maxsize=1024)
def _stand_in(kind: RecordType) -> type:
    warnings.warn(
        f"results of {f'{kind.module}.{kind.name}'[:100]} come as a stand-in with the same fields, since no class of "
        f"that name and fields ({', '.join(kind.fields)[:200]}) is imported here; import its module before the call "
        "(said once for this class)",
        StandIn,
        stacklevel=2,
    )
    last = kind.name.rpartition(".")[2]
    made: Any
    if kind.form == "mapping":
        made = type(last, (_NamedValues,), {})
    elif kind.form == "tuple":
        made = collections.namedtuple(last, kind.fields, rename=True)
    elif kind.form == "enum":
        made = enum.Enum(last, list(kind.fields))
    else:
        made = dataclasses.make_dataclass(last, kind.fields)
    made.__module__, made.__qualname__ = kind.module, kind.name  # by which a call's structure names it
    return made


def has_dataclasses(value: Any) -> bool:
    """Check whether a nested value holds a dataclass instance that pytree does not know."""
    return any(form_of(type(leaf)) == "dataclass" for leaf in pytree.tree_leaves(value, is_leaf=_is_instance))


def has_classes(nesting: str) -> bool:
    """Check whether a structure in pytree's JSON has classes that pytree does not know; mappings register theirs."""
    return any(f'[\\"{form}\\"' in nesting for form in ("dataclass", "tuple", "enum"))


# ------------------------------------------------------------------------------------------ for torch.export


@contextlib.contextmanager
def takes_records(model: torch.nn.Module) -> Generator[None]:
    """Meanwhile `forward` takes and returns records in place of instances, of which torch.export knows no class.

    The caller gives it `opened` arguments.
    """
    forward = model.forward

    @functools.wraps(forward)
    def with_records(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = closed((args, kwargs))
        return opened(forward(*args, **kwargs))

    with replaced_forward(model, with_records):
        yield


@contextlib.contextmanager
def replaced_forward(model: torch.nn.Module, forward: Callable[..., Any]) -> Generator[None]:
    """Meanwhile the model has this `forward`."""
    before = vars(model).get("forward")
    model.forward = forward
    try:
        yield
    finally:
        del model.forward
        if before is not None:
            model.forward = before


# --------------------------------------------------------------------------------------------------- in files


def to_json(kind: RecordType) -> str:
    """Write the class of a record."""
    return json.dumps([kind.form, kind.module, kind.name, list(kind.fields)])


def from_json(text: str) -> RecordType:
    """Read what `to_json` wrote. Raises `ValueError` or `ArtifactError` for anything else."""
    match parse_json(text.encode(), "the class of a record"):
        case [form, str(module), str(name), list(fields)]:
            plain = _is_path(module) and _is_path(name.replace("<locals>", "locals"))
            plain &= form != "enum" or len(fields) == 1
            if form in get_args(Form) and plain and all(map(_is_field, fields)):
                return RecordType(form=form, module=module, name=name, fields=tuple(fields))
    raise ValueError(f"not the class of a record: {text[:80]!r}")


def _is_path(text: str) -> bool:
    return len(text) <= 500 and all(map(str.isidentifier, text.split(".")))


def _is_field(name: Any) -> bool:
    """Check whether a name is harmless as an attribute: nothing of Python's own, such as `__class__`."""
    plain = isinstance(name, str) and len(name) <= 200 and name.isidentifier() and not keyword.iskeyword(name)
    return plain and not name.startswith("__")


def _with_keys(record: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """The values with their keys as `plain` has them: what torch.export notes of sizes goes by these."""
    fields = record.type.fields
    if record.type.form == "tuple":
        keys: list[Any] = [pytree.SequenceKey(index) for index in range(len(fields))]
    else:
        keys = [pytree.MappingKey(field) for field in fields]
    return list(zip(keys, record.values, strict=True)), record.type


pytree.register_pytree_node(
    FlattenedInstance,
    lambda record: (list(record.values), record.type),
    lambda values, kind: FlattenedInstance(kind, values),
    serialized_type_name=SERIALIZED,
    to_dumpable_context=to_json,
    from_dumpable_context=from_json,
    flatten_with_keys_fn=_with_keys,
)
