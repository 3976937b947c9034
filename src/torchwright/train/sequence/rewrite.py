"""The pass: a graph of whole sequences becomes one in which each process runs its part of them.

Every value of the captured graph is followed from the inputs on: whole, divided along an axis, or a sum still to be
made. Positions, masks and labels stay whole, so that they are those of the whole sequence; tokens are divided where
they become vectors. An operation runs on parts only where its rule says how (`rules.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from torchwright.train.sequence import collectives
from torchwright.train.sequence.decision import Call, Decision, Refused, shape
from torchwright.train.sequence.placement import PARTIAL, WHOLE, Placement, Shard
from torchwright.train.sequence.report import RewriteReport, SequenceParallelError, place_of
from torchwright.train.sequence.rules import LINEAR, name_of, rule_for
from torchwright.train.sequence.views import embedding


def rewrite(captured: GraphModule, ways: int, length: int, group: str) -> tuple[GraphModule, RewriteReport]:
    """Return the graph of one process of `ways`, and its report.

    `captured` returns the loss over sequences of `length` tokens; its nodes have their values' shapes. The result holds
    the same parameters and takes the same whole inputs on every process.
    """
    rewriting = _Rewriting(ways, length, group)
    for node in captured.graph.nodes:
        if name_of(node.target) == "_assert_tensor_metadata":
            # What the captured dtypes were; autocast may make others.
            captured.graph.erase_node(node)
    # A cache keeps a part of the keys for a later call that never comes.
    captured.graph.eliminate_dead_code()
    for node in captured.graph.nodes:
        rewriting.add(node, captured)
    rewriting.graph.set_codegen(captured.graph._codegen)
    return GraphModule(captured, rewriting.graph), rewriting.report


class _Rewriting:
    def __init__(self, ways: int, length: int, group: str) -> None:
        self.ways, self.length, self.group = ways, length, group
        self.graph, self.report = Graph(), RewriteReport(ways, length)
        self.places: dict[Node, Placement] = {}
        self.made: dict[tuple[Node, Placement], Node] = {}
        """The nodes of a captured value in the new graph, in each requested placement."""

    def add(self, node: Node, captured: GraphModule) -> None:
        if node.op == "output":
            self.graph.output(map_arg(node.args[0], self._loss))
        elif node.op == "placeholder":
            self._input(node)
        elif node.op == "get_attr":
            self._attribute(node, captured)
        elif node.target is operator.getitem:
            (several,) = node.all_input_nodes
            self._emit(node, Decision(self.places[several]))
        else:
            self._operation(node)

    def _keep(self, node: Node, new: Node, place: Placement) -> None:
        self.places[node] = place
        self.made[node, place] = new

    def _input(self, node: Node) -> None:
        self._keep(node, self.graph.node_copy(node), WHOLE)
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.ndim != 3:
            return
        if value.shape[1] == self.length != value.shape[2]:
            # Vectors of tokens, as `inputs_embeds`; masks stay whole.
            self._keep(node, self._value(node, Shard(1)), Shard(1))

    def _attribute(self, node: Node, captured: GraphModule) -> None:
        new = self.graph.node_copy(node)
        value = operator.attrgetter(str(node.target))(captured)
        if isinstance(value, torch.nn.Parameter) and value.requires_grad:
            new = self.graph.call_function(collectives.shared, (new, self.group))
        self._keep(node, new, WHOLE)

    def _operation(self, node: Node) -> None:
        operands = [self.places[each] for each in node.all_input_nodes]
        try:
            decision = self._decide(node)
            self._emit(node, decision)
        except Refused as refusal:
            self.report.refused.append(place_of(node, str(refusal)))
            # Followed on as if it were whole, to find what else is refused.
            self._keep(
                node, self.graph.node_copy(node, lambda each: self.made[each, self.places[each]]), WHOLE
            )
            return
        if decision.attention:
            self.report.attentions.append(place_of(node, decision.attention))
        if decision.output == PARTIAL and PARTIAL not in operands:
            self.report.sums.append(place_of(node, "each process has a term of it"))
        if any(isinstance(place, Shard) for place in (self.places[node], *operands)):
            self.report.divided += 1
        else:
            self.report.whole += 1

    def _decide(self, node: Node) -> Decision:
        partial = [each for each in node.all_input_nodes if self.places[each] == PARTIAL]
        if partial and _distributes(node, [self.places[each] for each in node.all_input_nodes]):
            return Decision(PARTIAL)
        # Everything else needs the sums themselves.
        places = self.places | dict.fromkeys(partial, WHOLE)
        decision = self._decide_on(node, places)
        decision = replace(decision, inputs=dict.fromkeys(partial, WHOLE) | dict(decision.inputs))
        for written in _written(node):
            if decision.inputs.get(written, self.places[written]) != self.places[written]:
                raise Refused("it writes into a tensor whose parts are elsewhere")
        return decision

    def _decide_on(self, node: Node, places: dict[Node, Placement]) -> Decision:
        if not any(isinstance(places[each], Shard) for each in node.all_input_nodes):
            if name_of(node.target) == "embedding":
                return embedding(Call(node, places, self.ways, self.group, self.length))
            if _draws(node):
                raise Refused(
                    "it draws random values for all tokens, which each process would draw differently"
                )
            return Decision(WHOLE)
        rule = rule_for(node.target)
        if rule is None:
            raise Refused("no rule says how it runs on a part of the sequence")
        return rule(Call(node, places, self.ways, self.group, self.length))

    def _emit(self, node: Node, decision: Decision) -> None:
        operands = {each: self._operand(each, decision) for each in node.all_input_nodes}
        if decision.call:
            function, arguments = decision.call
            new = self.graph.call_function(function, map_arg(arguments, operands.__getitem__))
        else:
            new = self.graph.node_copy(node, operands.__getitem__)
            _change(new, map_arg(dict(decision.changes), operands.__getitem__))
        if decision.scale is not None:
            new = self.graph.call_function(operator.mul, (new, decision.scale))
        if decision.then is not None:
            new = self._moved(new, shape(node), decision.output, decision.then)
        if _written(node):
            # What was cut from a tensor before it was written is not what it holds now.
            self.made = {key: made for key, made in self.made.items() if key[1] == self.places[key[0]]}
        self._keep(node, new, decision.then or decision.output)

    def _operand(self, node: Node, decision: Decision) -> Node:
        wanted = decision.inputs.get(node, self.places[node])
        if node not in decision.repeat:
            return self._value(node, wanted)
        dim, times = decision.repeat[node]
        sizes = list(shape(node))
        sizes[dim] *= times
        repeat = torch.ops.aten.repeat_interleave.self_int
        repeated = self.graph.call_function(repeat, (self.made[node, self.places[node]], times, dim))
        return self._moved(repeated, sizes, self.places[node], wanted)

    def _value(self, node: Node, wanted: Placement) -> Node:
        place = self.places[node]
        if (node, wanted) not in self.made:
            self.made[node, wanted] = self._moved(self.made[node, place], shape(node), place, wanted)
        return self.made[node, wanted]

    def _moved(self, new: Node, sizes: Sequence[int], place: Placement, wanted: Placement) -> Node:
        if place == wanted:
            return new
        if place == PARTIAL:
            summed = self.graph.call_function(collectives.total, (new, self.group))
            return self._moved(summed, sizes, WHOLE, wanted)
        if not isinstance(wanted, Shard):
            raise Refused("it needs all of a divided value")
        if sizes[wanted.dim] % (wanted.outer * self.ways):
            raise Refused(f"{self.ways} processes do not divide axis {wanted.dim} of {list(sizes)}")
        if place == WHOLE:
            arguments = (new, wanted.dim, wanted.outer, self.group)
            return self.graph.call_function(collectives.part, arguments)
        assert isinstance(place, Shard)
        if place.outer != 1 or wanted.outer != 1:
            raise Refused("axes that were merged cannot be exchanged")
        return self.graph.call_function(collectives.exchange, (new, place.dim, wanted.dim, self.group))

    def _loss(self, node: Node) -> Node:
        if shape(node) != ():
            raise SequenceParallelError(
                "the model does not return its loss",
                found=f"a tensor of shape {list(shape(node))}",
                allowed="a scalar, or an output with a scalar `loss`",
            )
        term = self._value(node, self.places[node])
        if self.places[node] == WHOLE:
            # Every process has all of it, and the sum over them is the loss.
            term = self.graph.call_function(operator.mul, (term, 1 / self.ways))
        return self.graph.call_function(collectives.total_loss, (term, self.group))


def _distributes(node: Node, operands: list[Placement]) -> bool:
    """Check whether the operation on each term gives the terms of its result."""
    name = name_of(node.target)
    if name in ("add", "add_", "sub"):
        return operands == [PARTIAL, PARTIAL]
    if name not in LINEAR or node.kwargs.get("rounding_mode"):
        return False
    value, first = node.meta["val"], node.all_input_nodes[0]
    if not (value.is_floating_point() and first.meta["val"].is_floating_point()) or first in node.args[1:]:
        return False  # a rounding, or a square
    return operands[0] == PARTIAL and all(place == WHOLE for place in operands[1:])


def _draws(node: Node) -> bool:
    """Check whether the operation draws random values; a dropout of 0, or outside training, does not."""
    if (
        not isinstance(node.target, torch._ops.OpOverload)
        or torch.Tag.nondeterministic_seeded not in node.target.tags
    ):
        return False
    call = Call(node, {}, 1, "", 0)
    return (call.get("train") is not False) and call.get("p") != 0 and call.get("dropout_p") != 0


def _written(node: Node) -> list[Node]:
    """The operands that the operation writes."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    call = Call(node, {}, 1, "", 0)
    writes = [
        each.name for each in node.target._schema.arguments if each.alias_info and each.alias_info.is_write
    ]
    return [value for name in writes if isinstance(value := call[name], Node)]


def _change(new: Node, changes: dict[str, Any]) -> None:
    """Put other values in place of arguments, by their names in the schema."""
    if not changes:
        return
    names = [each.name for each in new.target._schema.arguments]  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]
    for name, value in changes.items():
        if names.index(name) < len(new.args):
            new.update_arg(names.index(name), value)
        else:
            new.update_kwarg(name, value)
