# pyright: basic
"""Tables that a model makes anew at every call, of numbers alone, such as the masks of shifted windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument

from torchwright.optimization.engines.dispatch.call import written_by

aten = torch.ops.aten
MADE = {aten.zeros.default, aten.ones.default, aten.full.default}
MADE_LIKE = {aten.new_zeros.default, aten.new_ones.default, aten.new_full.default}
"""Operators that read only the dtype and the device of their first argument, not its values."""
LARGEST = 64 * 2**20
"""Bytes of a table, which an artifact keeps."""
ONCE = {"wrap_with_autocast", "wrap_with_set_grad_enabled"}
"""Operators that run a graph of their own, from its beginning to its end."""
KEPT = "made_table_"


def keep_tables(program: ExportedProgram, largest: int = LARGEST) -> None:
    """Replace, in place, tables that a graph fills by partial writes with their final contents.

    Each of Swin's masks is nine writes. In a graph without operators that write, each write selects between the old
    and the new value, one selection within the other, and these took most of the compile time of Swin-tiny. Values
    computed from weights or inputs stay, and so does a table without writes: compilers fold it. A table of more than
    `largest` bytes stays as well.
    """
    count, regions = 0, _regions(program)
    for region in regions:
        made = _made(region.graph, region.lifted)
        for table in _tables(region.graph, made):
            read = [node for node in table if not table.keys() >= node.users.keys()]
            if not any(written_by(node) for node in table) or not _is_settled(region.graph, table):
                continue
            values = _values(table, region.lifted)
            if values is None or sum(values[node].nbytes for node in read) > largest:
                continue
            for node in read:
                value = values[node].clone(memory_format=torch.contiguous_format)
                fake = node.meta["val"].fake_mode.from_tensor(value, static_shapes=True)
                node.replace_all_uses_with(_constant(program, region, f"{KEPT}{count}", value, fake))
                count += 1
            for node in reversed(table):
                region.graph.erase_node(node)
    for region in regions if count else ():
        _drop_unread(program, region)
        region.module.recompile()


@dataclass(frozen=True)
class _Region:
    """A graph of a program: its own, or one that it calls once, such as what runs under autocast."""

    module: fx.GraphModule
    lifted: dict[fx.Node, torch.Tensor]
    """Placeholder → its tensor, of numbers that stand in the model's code."""
    call: fx.Node | None = None
    """Return the node that runs it, in the graph of `caller`."""
    caller: _Region | None = None

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph


def _regions(program: ExportedProgram) -> list[_Region]:
    """The innermost first."""
    constants = {
        spec.arg.name: program.constants.get(spec.target or "")
        for spec in program.graph_signature.input_specs
        if spec.kind is InputKind.CONSTANT_TENSOR
    }
    module = program.graph_module
    lifted = {node: constants.get(node.name) for node in module.graph.find_nodes(op="placeholder")}
    known = {node: value for node, value in lifted.items() if isinstance(value, torch.Tensor)}
    found = [_Region(module, known)]
    for region in found:  # which grows
        for call in region.graph.nodes:
            if getattr(call.target, "_name", None) not in ONCE:
                continue
            body, operands = call.args[_body(call)], call.args[_body(call) + 1 :]
            inner = getattr(region.module, body.target)
            if len(body.users) > 1 or sum(node.target == body.target for node in region.graph.nodes) > 1:
                continue  # two calls, whose tensors may differ
            given = zip(inner.graph.find_nodes(op="placeholder"), operands, strict=True)
            known = {node: region.lifted[each] for node, each in given if each in region.lifted}
            found.append(_Region(inner, known, call, region))
    return found[::-1]


def _body(call: fx.Node) -> int:
    """Return the position of the nested graph among a call's arguments; that graph's own arguments follow."""
    return next(n for n, arg in enumerate(call.args) if isinstance(arg, fx.Node) and arg.op == "get_attr")


def _made(graph: fx.Graph, lifted: dict[fx.Node, torch.Tensor]) -> dict[fx.Node, None]:
    """Return the nodes that are computed from numbers alone and have one size, in the graph's order."""
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
            continue
        if not isinstance(value, torch.Tensor) or not all(isinstance(size, int) for size in value.shape):
            continue
        if torch.Tag.nondeterministic_seeded in node.target.tags:
            continue
        inputs = set(node.all_input_nodes)
        if node.target in MADE or node.target in MADE_LIKE:
            known = inputs <= ({node.args[0]} if node.target in MADE_LIKE else set())
        else:
            known = bool(inputs) and all(each in found or each in lifted for each in inputs)
        if known and not any(target in lifted for target in written_by(node)):
            found[node] = None
    return found


def _tables(graph: fx.Graph, made: dict[fx.Node, None]) -> list[dict[fx.Node, None]]:
    """Those parts of what is made that are computed of each other, and to which nothing else may write."""
    tables: dict[fx.Node, dict[fx.Node, None]] = {}
    for node in made:
        own = {node: None}
        for each in node.all_input_nodes:
            if each in tables and node.target not in MADE_LIKE:
                own = tables[each] | own
        for each in own:
            tables[each] = own
    foreign: set[fx.Node] = set()
    below: dict[fx.Node, set[fx.Node]] = {}
    """Return the nodes of which another node may be a view."""
    for node in graph.nodes:
        if node in made:
            below[node] = {node}
            continue
        inputs = set[fx.Node]().union(*(below.get(each, set()) for each in node.all_input_nodes))
        # A graph within the graph may write to all that it is given.
        calls_graph = isinstance(node.target, torch._ops.HigherOrderOperator)
        written = node.all_input_nodes if calls_graph else written_by(node)
        foreign |= set[fx.Node]().union(*(below.get(each, set()) for each in written))
        schema = getattr(node.target, "_schema", None)
        views = schema is None or any(result.alias_info is not None for result in schema.returns)
        below[node] = inputs if views else set()
    whole = {id(table): table for table in tables.values()}
    return [table for table in whole.values() if foreign.isdisjoint(table)]


def _is_settled(graph: fx.Graph, table: dict[fx.Node, None]) -> bool:
    """Check that a table is not read before its last write, and that no caller receives it."""
    written = False
    last = [node for node in table if written_by(node)][-1]
    readers = {user for node in table for user in node.users if user not in table}
    for node in graph.nodes:
        if node in readers and (not written or node.op != "call_function"):
            return False
        written = written or node is last
    return True


def _values(
    table: dict[fx.Node, None], lifted: dict[fx.Node, torch.Tensor]
) -> dict[fx.Node, torch.Tensor] | None:
    """None where one has another type than in the graph: autocast, under which it runs there, computes it otherwise."""
    values: dict[fx.Node, torch.Tensor] = {}
    with torch.no_grad():
        for node in table:

            def value(each: fx.Node) -> Any:
                if each in values or each in lifted:
                    return values[each] if each in values else lifted[each]
                like = each.meta["val"]  # of an operator that makes a table like it
                return torch.empty(0, dtype=like.dtype, device=like.device)

            args, kwargs = fx.map_arg((node.args, node.kwargs), value)
            run: Any = node.target
            values[node] = run(*args, **kwargs)
            if values[node].dtype != node.meta["val"].dtype:
                return None
    return values


def _constant(
    program: ExportedProgram, region: _Region, name: str, value: torch.Tensor, fake: torch.Tensor
) -> fx.Node:
    """A constant of a program, as the region's own placeholder."""
    if region.call is None or region.caller is None:
        specs = program.graph_signature.input_specs
        index = next(n for n, spec in enumerate(specs) if spec.kind is InputKind.USER_INPUT)
        with region.graph.inserting_before(region.graph.find_nodes(op="placeholder")[index]):
            constant = region.graph.placeholder(name)
        specs.insert(index, InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(name=constant.name), name))
        program.constants[name] = value
    else:
        outer = _constant(program, region.caller, name, value, fake)
        region.call.args = (*region.call.args, outer)
        computed = next(each for each in region.graph.nodes if each.op != "placeholder")
        with region.graph.inserting_before(computed):
            constant = region.graph.placeholder(name)
    constant.meta["val"] = fake
    return constant


def _drop_unread(program: ExportedProgram, region: _Region) -> None:
    for node in region.lifted:
        if node.users:
            continue
        if region.call is None:
            (spec,) = (each for each in program.graph_signature.input_specs if each.arg.name == node.name)
            program.graph_signature.input_specs.remove(spec)
            program.constants.pop(spec.target or "")
        else:
            at = _body(region.call) + 1 + region.graph.find_nodes(op="placeholder").index(node)
            region.call.args = region.call.args[:at] + region.call.args[at + 1 :]
        region.graph.erase_node(node)
