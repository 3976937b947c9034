"""Runs an operator by its name on tensors of a device's memory, with the CPU's kernel."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from torchwright_sim import wire

if TYPE_CHECKING:
    from torchwright_sim.process import Memory

_generator = threading.Lock()
"""The CPU's default generator is one for all streams."""


def clean(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor without a pending conjugation or negation."""
    return tensor.resolve_conj().resolve_neg()


def resolve(name: str) -> Any:
    """Return the operator of a name such as `aten::add.out`; raises `ValueError` for one that is not registered."""
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
    except AttributeError:
        raise ValueError(f"the device's process has no operator {name}") from None


class Evaluation:
    """Operators over one memory."""

    def __init__(self, memory: Memory, faults: dict[str, Any]) -> None:
        self.memory = memory
        self.faults = faults
        self.calls: dict[str, int] = {}
        self.written: list[torch.Tensor] = []
        """Tensors of the memory that the last operator wrote."""

    def run(
        self, header: dict[str, Any], payload: bytearray
    ) -> tuple[dict[str, Any], list[torch.Tensor], Any]:
        """Run the operator; returns its reply, tensors that have no place yet, and a generator's new state."""
        op = resolve(header["op"])
        self._count(header["op"])
        read = _Reader(self.memory, op)
        args, kwargs = read.all(header["args"], header["kwargs"])
        if default := header.get("default"):  # decides what numbers are promoted to
            torch.set_default_dtype(wire.DTYPES[default])
        if not payload:
            out, fresh = self._call(op, args, kwargs, read.outs)
            state: Any = b""
        else:
            with _generator:
                torch.default_generator.set_state(wire.from_raw(payload, torch.uint8, (len(payload),)))
                out, fresh = self._call(op, args, kwargs, read.outs)
                state = wire.raw(torch.default_generator.get_state())
        self.written = read.written
        said, made = describe(op, out, read, fresh)
        self._falsify(header["op"], made or read.written)
        return said, made, state

    def _call(
        self, op: Any, args: list[Any], kwargs: dict[str, Any], outs: list[str]
    ) -> tuple[Any, list[str]]:
        """Call it; an output too small for the result has to be a new tensor, and is named."""
        none = [name for name in outs if not kwargs[name].untyped_storage().nbytes()]
        try:
            found = op(*args, **kwargs)
            # One without memory was a tensor of the CPU, which has given it some.
            return found, outs if any(kwargs[name].numel() for name in none) else []
        except RuntimeError as error:
            # The device's memory is not the CPU's to resize. It asks before it computes.
            if not outs or "not resizable" not in str(error):
                raise
        fresh = {name: torch.empty(0, dtype=kwargs[name].dtype) for name in outs}
        return op(*args, **kwargs | fresh), outs

    def _count(self, name: str) -> None:
        base = name.partition(".")[0]
        if base not in self.faults:
            return
        kind, first = self.faults[base]
        self.calls[base] = self.calls.get(base, 0) + 1
        if self.calls[base] < first:
            return
        if kind == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if kind == "hang":
            time.sleep(1e6)

    def _falsify(self, name: str, tensors: list[torch.Tensor]) -> None:
        base = name.partition(".")[0]
        if (
            base in self.faults
            and self.faults[base][0] == "wrong"
            and self.calls[base] >= self.faults[base][1]
        ):
            for tensor in tensors:
                tensor.logical_not_() if tensor.dtype == torch.bool else tensor.add_(1)


class _Reader:
    """Arguments of a call: decodes them, and remembers which tensors the operator writes."""

    def __init__(self, memory: Memory, op: Any) -> None:
        self.memory = memory
        self.arguments = op._schema.arguments
        self.takes_numbers: bool = torch._C._should_allow_numbers_as_tensors(
            op._schema.name.partition("::")[2]
        )
        self.written: list[torch.Tensor] = []
        self.before: list[tuple[Any, ...]] = []
        self.outs: list[str] = []
        self._writes = False

    def all(self, args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        by_name = {argument.name: argument for argument in self.arguments}
        plain = [self._argument(schema, value) for schema, value in zip(self.arguments, args, strict=False)]
        named = {name: self._argument(by_name[name], value) for name, value in kwargs.items()}
        return plain, named

    def _argument(self, schema: Any, value: Any) -> Any:
        self._writes = schema.alias_info is not None and schema.alias_info.is_write
        if self._writes and schema.kwarg_only and value is not None and value[0] == "t":
            self.outs.append(schema.name)
        return self.value(value)

    def value(self, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        tag, *rest = value
        match tag:
            case "t":
                found = self.memory.tensor(wire.Place.decode(rest[0]))
                if self._writes:
                    self.written.append(found)
                    self.before.append((found.size(), found.stride(), found.storage_offset()))
                return found
            case "l":
                return [self.value(each) for each in rest[0]]
            case "h":
                dtype, data, plain = rest
                number = wire.from_raw(bytearray.fromhex(data), wire.DTYPES[dtype], ())
                # Where PyTorch takes a number for a tensor it gives way to the dtypes of tensors.
                return number.item() if plain and self.takes_numbers else number
            case "d":
                return wire.DTYPES[rest[0]]
            case "y":
                return wire.LAYOUTS[rest[0]]
            case "m":
                return wire.FORMATS[rest[0]]
            case "c":
                return complex(*rest)
            case "v":
                return torch.device("cpu")
            case "g":
                return torch.default_generator
        raise ValueError(f"a value of the kind '{tag}'")


def describe(op: Any, out: Any, read: _Reader, fresh: list[str]) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Say what came out: shapes of tensors that have no place yet, numbers, and outputs whose shape changed."""
    made: list[torch.Tensor] = []
    returns = op._schema.returns
    outs = (out,) if len(returns) == 1 else out or ()
    results: list[Any] = []
    for schema, value in zip(returns, outs, strict=True):
        if schema.alias_info is None or (schema.alias_info.is_write and fresh):
            results.append(_shape(value, made))
        else:
            results.append(None)  # an argument, which the host has
    changed = (
        []
        if fresh
        else [
            [index, tuple(tensor.size()), tensor.stride(), tensor.storage_offset()]
            for index, (tensor, before) in enumerate(zip(read.written, read.before, strict=True))
            if (tensor.size(), tensor.stride(), tensor.storage_offset()) != before
        ]
    )
    said: dict[str, Any] = {"results": results}
    if changed:
        said["changed"] = changed
    if fresh:
        said["fresh"] = fresh
    return said, made


def _shape(value: Any, made: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise NotImplementedError(
                f"a result of the layout {value.layout}, which the device does not have"
            )
        dense = clean(value)
        # As the CPU lays it out, where that leaves no gaps.
        if dense.storage_offset() or dense.untyped_storage().nbytes() != dense.numel() * dense.itemsize:
            dense = dense.contiguous()
        made.append(dense)
        return ["t", wire.name(dense.dtype), tuple(dense.size()), dense.stride()]
    if isinstance(value, list | tuple):
        return ["l", [_shape(each, made) for each in value]]
    if isinstance(value, complex):
        return ["c", value.real, value.imag]
    if isinstance(value, torch.dtype):
        return ["d", wire.name(value)]
    return value
