# pyright: basic, reportAttributeAccessIssue=false, reportPrivateImportUsage=false
"""Check a graph's file before torch's deserializer sees it: plain data of torch's schema, every string held to a
rule.

    graphs = checked(json)       programs.json as plain data, rebuilt

torch's loader trusts its files: it looks operators up with `getattr`, evaluates shapes, executes guards, imports what
the structure of inputs names, and writes all names into Python and C++ that it generates. So each string of the
schema has a rule here, and a string without a rule is refused. Fields that only a debugger reads (stack traces,
modules) are dropped.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import keyword
import re
import types
import typing
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any, NotRequired

from torch._export.serde import schema
from torch._export.serde.union import _Union
from typing_extensions import TypedDict  # that of typing serves pydantic from Python 3.12

from torchwright.core import nested
from torchwright.core.json_file import parse_json
from torchwright.hardware.devices import devices
from torchwright.optimization.engines.dispatch.results import HOMES
from torchwright.optimization.engines.safety.expressions import (
    KEY,
    LARGEST_INTEGER,
    SYMBOL,
    check_shape,
    guard,
    node_bits,
)
from torchwright.optimization.engines.safety.operators import PLAIN, is_allowed

MOST_VALUES = 20_000_000
"""The limit on one file's values: numbers, strings, lists and objects."""
SIZE_BITS = 64
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,999}")
PATH = re.compile(r"[A-Za-z0-9_\-+@:/ ]{1,500}(\.[A-Za-z0-9_\-+@:/ ]{1,500}){0,99}")
"""The pattern of a parameter's or module's name."""
REGISTERED = re.compile(r"torch\.ops\.[A-Za-z]\w*\._?[A-Za-z]\w*\.[A-Za-z]\w*", re.ASCII)
TEXT = re.compile(r"[A-Za-z0-9_ ,.>:;=+*()\[\]-]{0,1000}")
"""A constant argument, such as the equation of an einsum: nothing that ends a text in Python or C++."""
_REFUSED = """
as_custom_obj as_operator as_string_to_argument custom_obj token loss_output gradient_to_parameter
gradient_to_user_input
"""
REFUSED = frozenset(_REFUSED.split())
"""Choices of the schema that no graph of ours takes."""
DROPPED = {
    ("Node", "metadata"),
    ("GraphModule", "metadata"),
    ("GraphModule", "treespec_namedtuple_fields"),
}
SEQUENCES = ("builtins.tuple", "builtins.list")
MAPPINGS = ("builtins.dict", "collections.OrderedDict")
OUTPUTS = tuple(f"{library}." for library in HOMES)
"""Whose classes of results are dicts by another name."""


Rules = dict[tuple[str, str], Callable[[str], str]]


class TensorEntry(TypedDict):
    """A tensor of the state or a constant, by its name in the file of tensors."""

    tensor: str
    stride: list[int]
    parameter: bool
    device: NotRequired[str]


class ProgramEntry(TypedDict):
    """One graph of programs.json."""

    graph: dict[str, Any]
    state: dict[str, TensorEntry]
    constants: dict[str, TensorEntry]


def checked(graphs: Any, *, trust: bool = False) -> dict[str, ProgramEntry]:
    """The content of programs.json, rebuilt from what the schema and the rules know.

    With `trust` it may call any operator that is registered, such as those of a library of the user's own.

    Raises `ValueError` or `ArtifactError`, in words, for anything else.
    """
    entries = _entries(graphs)
    rebuilding = _Rebuilding(RULES | TRUSTED if trust else RULES)
    for name, entry in entries.items():
        for path, kept in (*entry["state"].items(), *entry["constants"].items()):
            _path(path)
            _device(kept.get("device", "cpu"))
        if not KEY.fullmatch(re.sub(r"[(),]", "", name)):
            raise ValueError(f"a call of the name {name[:80]!r}")
        entry["graph"] = rebuilding.of(schema.ExportedProgram, entry["graph"], ("", ""))
    return entries


def _entries(graphs: Any) -> dict[str, ProgramEntry]:
    from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

    strict = with_config(ConfigDict(extra="forbid", strict=True))
    strict(TensorEntry)
    strict(ProgramEntry)
    try:
        return TypeAdapter(dict[str, ProgramEntry]).validate_python(graphs)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))[:200]}: {first['msg']}") from error


class _Rebuilding:
    """Walks data and torch's schema side by side."""

    def __init__(self, rules: Rules) -> None:
        self._left, self._rules = MOST_VALUES, rules

    def of(self, kind: Any, data: Any, field: tuple[str, str]) -> Any:
        """`data` as a `kind`; `field` is the class and field of the schema that it stands in."""
        self._left -= 1
        if self._left < 0:
            raise ValueError(f"a graph with more than {MOST_VALUES:,} values")
        origin, inner = typing.get_origin(kind), typing.get_args(kind)
        if origin in (typing.Union, types.UnionType):
            return None if data is None else self.of(inner[0], data, field)
        if origin is list and isinstance(data, list):
            return [self.of(inner[0], item, field) for item in data]
        if origin is dict and isinstance(data, dict):
            return {_key(field, key): self.of(inner[1], item, field) for key, item in data.items()}
        if isinstance(kind, type) and isinstance(data, dict):
            if issubclass(kind, _Union):
                return self._choice(kind, data)
            if dataclasses.is_dataclass(kind):
                return self._object(kind, data)
        if isinstance(kind, type) and origin is None:
            return _leaf(kind, data, field, self._rules)
        raise ValueError(f"{'.'.join(field)} is a {type(data).__name__}")

    def _choice(self, kind: type, data: dict[str, Any]) -> dict[str, Any]:
        if len(data) != 1:
            raise ValueError(f"{len(data)} choices for a {kind.__name__}")
        ((name, value),) = data.items()
        if name not in _hints(kind) or name in REFUSED:
            raise ValueError(f"a graph with {name[:80]}")
        return {name: self.of(_hints(kind)[name], value, (kind.__name__, name))}

    def _object(self, kind: type, data: dict[str, Any]) -> dict[str, Any]:
        hints = _hints(kind)
        if kind is schema.Node:
            data = _without_messages(data)
        for name in data.keys() - hints.keys():
            raise ValueError(f"a {kind.__name__} with {name[:80]}")
        for needed in dataclasses.fields(kind):
            optional = (
                needed.default is not dataclasses.MISSING or needed.default_factory is not dataclasses.MISSING
            )
            if needed.name not in data and not optional:
                raise ValueError(f"a {kind.__name__} without {needed.name}")
        rebuilt: dict[str, Any] = {
            name: {}
            if (kind.__name__, name) in DROPPED
            else self.of(hints[name], data[name], (kind.__name__, name))
            for name in hints
            if name in data
        }
        if kind is schema.Graph:
            _check_sizes(rebuilt["nodes"])
        names = rebuilt.get("forward_arg_names") or []
        if len(set(names)) != len(names):
            raise ValueError("two arguments of one name")
        return rebuilt


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return {
        name: hint
        for name, hint in typing.get_type_hints(kind, globalns=dict(vars(schema))).items()
        if not name.startswith("_")
    }


def _leaf(kind: type, data: Any, field: tuple[str, str], rules: Rules) -> Any:
    if kind is str and isinstance(data, str):
        if field not in rules:
            raise ValueError(f"a text in {'.'.join(field)}")
        return rules[field](data)
    if kind is bool and isinstance(data, bool):
        return data
    if kind is float and (data in ("Infinity", "-Infinity", "NaN") or type(data) in (int, float)):
        return float(data)
    if kind is int and type(data) is int and -LARGEST_INTEGER <= data < LARGEST_INTEGER:
        return data
    if issubclass(kind, IntEnum) and type(data) is int and data in {member.value for member in kind}:
        if kind is schema.Layout and data != schema.Layout.Strided:
            raise ValueError("a tensor that is not dense")
        return data
    raise ValueError(f"{'.'.join(field)} is {str(data)[:80]!r}")


def _without_messages(node: dict[str, Any]) -> dict[str, Any]:
    """An assertion without its message, which may hold any text and goes into generated code."""
    if not str(node.get("target")).startswith("torch.ops.aten._assert"):
        return node
    inputs = [
        {**item, "arg": {"as_string": "an assertion of the model failed"}}
        if isinstance(item, dict) and isinstance(item.get("arg"), dict) and "as_string" in item["arg"]
        else item
        for item in node.get("inputs") or []
    ]
    return {**node, "inputs": inputs}


def _key(field: tuple[str, str], key: str) -> str:
    return _symbol(key) if field == ("ExportedProgram", "range_constraints") else _name(key)


def _check_sizes(nodes: list[dict[str, Any]]) -> None:
    """Bound what a chain of operators on sizes can come to, which are Python's own integers when it runs."""
    known: dict[str, int] = {}
    for node in nodes:
        if node["target"] not in PLAIN or not node["outputs"]:
            continue
        values, bits = [], []
        for argument in (item["arg"] for item in node["inputs"]):
            ((kind, value),) = argument.items()
            if kind == "as_sym_int":
                ((kind, value),) = value.items()
            constant = kind == "as_int"
            values.append(value if constant else None)
            bits.append(max(1, value.bit_length()) if constant else known.get(str(value), SIZE_BITS))
        found = node_bits(node["target"].partition(".")[2], values, bits)
        for name in _named(node["outputs"]):
            known[name] = found


def _named(outputs: list[dict[str, Any]]) -> Iterator[str]:
    """The names of sizes among a node's outputs."""
    for output in outputs:
        for value in output.values():
            if isinstance(value, dict) and "as_name" in value:
                yield value["as_name"]


def _matching(pattern: re.Pattern[str], what: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        if not pattern.fullmatch(text):
            raise ValueError(f"{what} that is none: {text[:80]!r}")
        return text

    return check


_symbol = _matching(SYMBOL, "a symbol")
_text = _matching(TEXT, "a constant text")


def _name(text: str) -> str:
    if not NAME.fullmatch(text) or keyword.iskeyword(text):
        raise ValueError(f"a name that is none: {text[:80]!r}")
    return text


def _optional_name(text: str) -> str:
    return text and _name(text)


def _path(text: str) -> str:
    if text and (not PATH.fullmatch(text) or any(part.startswith("__") for part in text.split("."))):
        raise ValueError(f"a parameter or module of the name {text[:80]!r}")
    return text


def _target(text: str) -> str:
    if not is_allowed(text):
        raise ValueError(f"an operator that no graph may call without trust: {text[:80]!r}")
    return text


def _registered(text: str) -> str:
    return text if REGISTERED.fullmatch(text) else _target(text)


def _shape(text: str) -> str:
    check_shape(text)
    return text


def _device(text: str) -> str:
    if text not in devices.names():
        raise ValueError(f"the device {text[:80]!r}")
    return text


def _one_of(*allowed: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"{text[:80]!r} instead of {' or '.join(allowed)}")
        return text

    return check


def structure(text: str) -> str:
    """Return the nesting of inputs or outputs, written afresh: leaves, lists, tuples, dicts and records."""
    data = parse_json(text.encode(), "the structure of inputs")
    if not (isinstance(data, list) and len(data) == 2 and data[0] == 1):
        raise ValueError("inputs of a structure that is none")
    return json.dumps([1, _nesting(data[1])])


def _nesting(data: Any) -> dict[str, Any]:
    if not isinstance(data, dict) or data.keys() != {"type", "context", "children_spec"}:
        raise ValueError("inputs of a structure that is none")
    kind, context, children = data["type"], data["context"], data["children_spec"]
    if not isinstance(children, list) or not (kind is None or isinstance(kind, str)):
        raise ValueError("inputs of a structure that is none")
    if kind is None and (context is not None or children):
        raise ValueError("a leaf with children")
    if kind in MAPPINGS or (kind is not None and kind.startswith(OUTPUTS)):
        _check_keys(context, len(children))
    elif kind == nested.SERIALIZED:
        if not isinstance(context, str) or len(nested.from_json(context).fields) != len(children):
            raise ValueError("a record without its fields")
    elif kind in SEQUENCES:
        if context != "null":
            raise ValueError(f"a {kind} with a context")
    elif kind is not None:
        raise ValueError(f"inputs or outputs of the type {kind[:80]!r}")
    below = [_nesting(child) for child in children]
    return {"type": kind, "context": context, "children_spec": below}


def _check_keys(context: Any, count: int) -> None:
    keys = parse_json(context.encode(), "the keys of a dict") if isinstance(context, str) else None
    if not isinstance(keys, list) or len(keys) != count:
        raise ValueError("a dict without its keys")
    for key in keys:
        if not (type(key) is int or (isinstance(key, str) and KEY.fullmatch(key))):
            raise ValueError(f"a dict with the key {str(key)[:80]!r}")


def _inputs(text: str) -> str:
    """The nesting of (args, kwargs), whose keywords become names in generated code."""
    written = structure(text)
    match json.loads(written)[1]["children_spec"]:
        case [{"type": "builtins.tuple"}, {"type": "builtins.dict", "context": keys}]:
            for key in json.loads(keys):
                _name(str(key))
            return written
    raise ValueError("inputs that are no arguments")


RULES: Rules = {
    ("Argument", "as_string"): _text,
    ("Argument", "as_strings"): _text,
    ("BufferMutationSpec", "buffer_name"): _path,
    ("ConstantValue", "as_string"): _text,
    ("Device", "type"): _device,
    ("ExportedProgram", "guards_code"): guard,
    ("ExportedProgram", "torch_version"): _matching(re.compile(r"[0-9A-Za-z.+<=-]{0,50}"), "a version"),
    ("ExportedProgram", "verifiers"): _one_of("TRAINING", "ATEN"),
    ("GraphArgument", "name"): _name,
    ("InputToBufferSpec", "buffer_name"): _path,
    ("InputToConstantInputSpec", "name"): _optional_name,
    ("InputToParameterSpec", "parameter_name"): _path,
    ("InputToTensorConstantSpec", "tensor_constant_name"): _path,
    ("ModuleCallEntry", "fqn"): _path,
    ("ModuleCallSignature", "forward_arg_names"): _name,
    ("ModuleCallSignature", "in_spec"): _inputs,
    ("ModuleCallSignature", "out_spec"): structure,
    ("NamedArgument", "name"): _optional_name,
    ("Node", "name"): _optional_name,
    ("Node", "target"): _target,
    ("ParameterMutationSpec", "parameter_name"): _path,
    ("SymBoolArgument", "as_name"): _name,
    ("SymExpr", "expr_str"): _shape,
    ("SymFloatArgument", "as_name"): _name,
    ("SymIntArgument", "as_name"): _name,
    ("TensorArgument", "name"): _name,
    ("UserInputMutationSpec", "user_input_name"): _name,
}
"""(class, field) of torch's schema → what its text must be."""
TRUSTED: Rules = {("Node", "target"): _registered}
"""Instead of those, for a file that is the user's own or trusted."""
