"""PyTorch's operators on simulated devices: each is sent by its name to the device's process.

What only concerns handles (allocation, views) is in csrc/operators.h.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch

from torchwright_sim import NAME, wire
from torchwright_sim.driver import Link, link

aten: Any = torch.ops.aten
_sim: Any = torch.ops.sim

HOST_ARGUMENTS = {
    "aten::_pack_padded_sequence": ("lengths",),
    "aten::index": ("indices",),
    "aten::_index_put_impl_": ("indices",),
    "aten::index_put": ("indices",),
    "aten::index_put_": ("indices",),
    "aten::_unsafe_index": ("indices",),
}
"""Arguments that may be tensors of the host for any accelerator."""
HOST_RESULTS = {"aten::_pack_padded_sequence": (1,)}
"""Results that lie on the host for any accelerator."""


NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
"""The dtype of a tensor that PyTorch makes from a number; it gives way to those of other tensors."""


@dataclass(frozen=True)
class Plan:
    """Facts about an operator, from its schema."""

    name: str
    """With namespace and overload."""
    base: str
    names: tuple[str, ...]
    written: frozenset[str]
    tensors: frozenset[str]
    """Arguments that are tensors: a number there is what PyTorch shows Python of a tensor made from a number."""
    returned: tuple[str | None, ...]
    """For each result the argument that it is, or None for a new tensor."""
    several: bool
    draws: bool
    views: bool


@functools.cache
def plan(op: Any) -> Plan:
    """Return the facts about an operator."""
    schema = op._schema
    written: dict[frozenset[str], str] = {}
    names: set[str] = set()
    for argument in schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            written[frozenset(argument.alias_info.before_set)] = argument.name
            names.add(argument.name)
    returned: list[str | None] = []
    views = False
    for result in schema.returns:
        alias = result.alias_info
        returned.append(written.get(frozenset(alias.before_set)) if alias is not None else None)
        views = views or (alias is not None and returned[-1] is None)
    name = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
    return Plan(
        name=name,
        base=schema.name,
        names=tuple(argument.name for argument in schema.arguments),
        written=frozenset(names),
        tensors=frozenset(
            argument.name
            for argument in schema.arguments
            if str(argument.type) in ("Tensor", "Optional[Tensor]")
        ),
        returned=tuple(returned),
        several=len(schema.returns) != 1,
        draws=torch.Tag.nondeterministic_seeded in op.tags,
        views=views,
    )


def run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator in the process of the device that its tensors lie on."""
    return run_as(plan(op), args, kwargs)


def run_as(facts: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator by the facts about it."""
    if facts.views:
        raise NotImplementedError(f"{facts.name} makes a view, which {NAME} does not have")
    call = Call(facts)
    encoded = [call.argument(name, value) for name, value in zip(facts.names, args, strict=False)]
    named = {name: call.argument(name, value) for name, value in kwargs.items()}
    device = call.device()
    call.check_fault()
    header: dict[str, Any] = {"op": facts.name, "args": encoded, "kwargs": named}
    if default := device.changed_default():
        header["default"] = default
    device.check(facts.name, call.read, call.written)
    generator, state = call.generator(device.index), b""
    if generator is not None:
        state = wire.raw(generator.get_state())
    reply, after = device.call("run", header, state, held=(args, kwargs))
    if generator is not None:
        generator.set_state(wire.from_raw(after, torch.uint8, (len(after),)))
    return call.results(device, reply)


@dataclass
class Call:
    """One call: its tensors by what is done with them."""

    facts: Plan
    places: set[int] = field(default_factory=set)
    read: list[int] = field(default_factory=list)
    """Addresses of storages."""
    written: list[int] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    """Tensors that the operator writes, in the order of the arguments."""
    by_name: dict[str, Any] = field(default_factory=dict)
    host: list[torch.Tensor] = field(default_factory=list)
    given: torch.Generator | None = None

    def argument(self, name: str, value: Any) -> Any:
        """Encode an argument; see `wire`."""
        writes = name in self.facts.written
        if writes:
            self.by_name[name] = value
        if name in self.facts.tensors and isinstance(value, bool | int | float | complex):
            number = torch.tensor(value, dtype=NUMBERS[type(value)])
            return ["h", wire.name(number.dtype), bytes(wire.raw(number)).hex(), True]
        return self._encode(value, writes, name)

    def _encode(self, value: Any, writes: bool, name: str) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value, writes, name)
        if isinstance(value, bool | int | float | str) or value is None:
            return value
        if isinstance(value, list | tuple):
            return ["l", [self._encode(each, writes, name) for each in value]]
        if isinstance(value, torch.dtype):
            return ["d", wire.name(value)]
        if isinstance(value, complex):
            return ["c", value.real, value.imag]
        if isinstance(value, torch.device):
            if value.type == NAME:
                self.places.add(torch.device(value).index or 0)
            return ["v"]
        if isinstance(value, torch.layout):
            return ["y", wire.name(value)]
        if isinstance(value, torch.memory_format):
            return ["m", wire.name(value)]
        if isinstance(value, torch.Generator):
            if value.device.type != NAME:
                raise RuntimeError(
                    f"Expected a '{NAME}' device type for generator but found '{value.device.type}'"
                )
            self.given = value
            return ["g"]
        raise TypeError(
            f"{self.facts.name} has an argument {name} of type {type(value).__name__}, which {NAME} cannot send"
        )

    def _tensor(self, tensor: torch.Tensor, writes: bool, name: str) -> Any:
        if tensor.device.type == NAME:
            self.places.add(tensor.device.index)
        elif tensor.device.type == "cpu" and not writes and not tensor.dim():
            number = tensor.detach().resolve_conj().resolve_neg()
            return ["h", wire.name(number.dtype), bytes(wire.raw(number)).hex(), False]
        elif tensor.device.type == "cpu" and name in HOST_ARGUMENTS.get(self.facts.base, ()):
            self.host.append(tensor)
            tensor = tensor.to(torch.device(NAME, min(self.places, default=0)))
            self.host.append(tensor)  # until the call is over
        else:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {NAME} and "
                f"{tensor.device}! ({self.facts.name}, argument {name})"
            )
        if tensor.layout is not torch.strided:
            raise NotImplementedError(
                f"{self.facts.name}: {NAME} has no tensors of the layout {tensor.layout}"
            )
        (self.written if writes else self.read).append(tensor.untyped_storage().data_ptr())
        if writes:
            self.tensors.append(tensor)
        return ["t", place(tensor).encode()]

    def device(self) -> Link:
        if len(self.places) > 1:
            found = ", ".join(f"{NAME}:{index}" for index in sorted(self.places))
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {found}! "
                f"({self.facts.name})"
            )
        return link(min(self.places, default=int(_sim._device.default())))

    def generator(self, device: int) -> torch.Generator | None:
        if not self.facts.draws and self.given is None:
            return None
        return self.given if self.given is not None else _sim._default_generator.default(device)

    def check_fault(self) -> None:
        """Do what a fault of this process asks for."""
        from torchwright_sim import faults

        faults.on_host(self.facts.base)

    def results(self, device: Link, reply: dict[str, Any]) -> Any:
        """Return the operator's results; new tensors are allocated here and filled by the device."""
        made: list[torch.Tensor] = []
        try:
            for index, size, stride, start in reply.get("changed", ()):
                self.tensors[index].as_strided_(size, stride, start)
            if fresh := reply.get("fresh"):
                self._refill(fresh, reply["results"], made)
                found: list[Any] = [self.by_name[name] for name in self.facts.returned if name]
            else:
                on_host = HOST_RESULTS.get(self.facts.base, ())
                found = [
                    self.by_name[name] if name else self._result(device.index, value, made)
                    for name, value in zip(self.facts.returned, reply["results"], strict=True)
                ]
        except BaseException:
            device.launch("drop", {"from": reply["n"]})
            raise
        if made:
            device.check(self.facts.name, [], [each.untyped_storage().data_ptr() for each in made])
            device.launch(
                "store", {"from": reply["n"], "to": [place(each).encode() for each in made]}, held=made
            )
            if not fresh:
                found = [value.cpu() if index in on_host else value for index, value in enumerate(found)]
        if self.facts.several:
            return tuple(found) if found else None
        return found[0]

    def _refill(self, names: list[str], shapes: list[Any], made: list[torch.Tensor]) -> None:
        """Give the outputs of an `out=` call the shape of the results."""
        for name, (_, _, size, stride) in zip(names, shapes, strict=True):
            out = self.by_name[name]
            out.resize_(size)
            out.as_strided_(size, stride)
            made.append(out)

    def _result(self, device: int, value: Any, made: list[torch.Tensor]) -> Any:
        if not isinstance(value, list):
            return value
        tag, *rest = value
        if tag == "t":
            dtype, size, stride = rest
            made.append(
                torch.empty_strided(size, stride, dtype=wire.DTYPES[dtype], device=torch.device(NAME, device))
            )
            return made[-1]
        if tag == "l":
            return [self._result(device, each, made) for each in rest[0]]
        return complex(*rest) if tag == "c" else wire.DTYPES[rest[0]]


def place(tensor: torch.Tensor) -> wire.Place:
    """Return where a tensor lies in its device's memory."""
    storage = tensor.untyped_storage()
    nbytes = storage.nbytes()
    offset = storage.data_ptr() - link(tensor.device.index).base if nbytes else 0
    return wire.Place(
        offset,
        nbytes,
        tensor.dtype,
        int(tensor.storage_offset()),
        tuple(tensor.size()),
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )
