# pyright: basic
"""Complex numbers of an exported graph as pairs of real ones, in place and in the graph's functional form.

A complex tensor becomes two nodes, its real and its imaginary part. Constants and inputs that are complex are read
through `view_as_real`, results that are complex are put together at the end. What computes with complex values by an
operator that has no rule here is refused by its line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from torchwright.core.errors import RefusedTechnique
from torchwright.optimization.profile.breaks import FRAME

aten = torch.ops.aten
Pair = tuple[Any, Any]
LINEAR = frozenset(
    {
        *(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.expand.default),
        *(
            aten.slice.Tensor,
            aten.select.int,
            aten.index.Tensor,
            aten.index_select.default,
            aten.gather.default,
        ),
        *(aten.permute.default, aten.transpose.int, aten.t.default, aten.flip.default, aten.roll.default),
        *(
            aten.unsqueeze.default,
            aten.squeeze.default,
            aten.squeeze.dim,
            aten.squeeze.dims,
            aten.repeat.default,
        ),
        *(aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default),
        *(aten.neg.default, aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim),
        *(aten.cumsum.default, aten.tril.default, aten.triu.default, aten.zeros_like.default),
    }
)
"""Operators that treat both parts alike; none of their other arguments is complex."""
PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64, torch.complex32: torch.float16}


def has_complex(graph_module: GraphModule) -> bool:
    """Check whether any value of a graph is complex."""
    return any(_is_complex(node) for node in graph_module.graph.nodes)


def real_pairs(graph_module: GraphModule) -> None:
    """Rewrite complex arithmetic; raises `RefusedTechnique` with the line of what has no rule."""
    graph = graph_module.graph
    pairs: dict[Node, Pair] = {}
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for node in list(graph.nodes):
        if not (_is_complex(node) or any(read in pairs for read in node.all_input_nodes)):
            continue
        pair = _Pairs(node, pairs)
        with graph.inserting_before(first if node.op == "placeholder" else node):
            if node.op == "placeholder":
                pairs[node] = pair.parts(node)
            elif node.op == "output":
                wholes = {read: pair.whole(pairs[read]) for read in node.all_input_nodes if read in pairs}
                node.args = map_arg(node.args, lambda value, wholes=wholes: wholes.get(value, value))
            elif _is_complex(node):
                pairs[node] = pair.rewritten()
            else:
                node.replace_all_uses_with(pair.rewritten())
    graph.eliminate_dead_code()
    graph.lint()
    graph_module.recompile()


class _Pairs:
    """The rules, for one node: each adds operators before it."""

    def __init__(self, node: Node, pairs: dict[Node, Pair]) -> None:
        self._node, self._pairs = node, pairs

    def rewritten(self) -> Any:
        """A pair where the node is complex, a real value where it is real."""
        target: Any = self._node.target
        args: Any = map_arg(self._node.args, lambda node: self._pairs.get(node, node))
        rule = self._rules().get(target)
        if target in LINEAR and not self._node.kwargs.get("dtype"):
            real, imaginary = args[0]
            return tuple(
                self._add(target, part, *args[1:], **self._node.kwargs) for part in (real, imaginary)
            )
        if rule is None or self._node.kwargs.keys() - {"dtype", "layout", "device"}:
            raise self._refusal()
        return rule(*args)

    def parts(self, node: Node) -> Pair:
        """Return the pair of a complex tensor that the graph is given."""
        both = self._add(aten.view_as_real.default, node)
        return self._unstacked(both)

    def whole(self, pair: Pair) -> Node:
        """A complex tensor of its parts."""
        return self._add(aten.view_as_complex.default, self._stacked(pair))

    def _rules(self) -> dict[Any, Callable[..., Any]]:
        return {
            aten.view_as_complex.default: self._unstacked,
            aten.view_as_real.default: self._stacked,
            aten.complex.default: lambda real, imaginary: (real, imaginary),
            aten.polar.default: self._polar,
            aten.mul.Tensor: lambda a, b: self._product(aten.mul.Tensor, a, b),
            aten.mul.Scalar: lambda a, b: self._product(aten.mul.Tensor, a, b),
            aten.matmul.default: lambda a, b: self._product(aten.matmul.default, a, b),
            aten.mm.default: lambda a, b: self._product(aten.mm.default, a, b),
            aten.bmm.default: lambda a, b: self._product(aten.bmm.default, a, b),
            aten.add.Tensor: lambda a, b: self._both(aten.add.Tensor, a, b),
            aten.sub.Tensor: lambda a, b: self._both(aten.sub.Tensor, a, b),
            aten.div.Tensor: self._quotient,
            aten.cat.default: lambda values, *dim: self._joined(aten.cat.default, values, *dim),
            aten.stack.default: lambda values, *dim: self._joined(aten.stack.default, values, *dim),
            aten.where.self: lambda condition, a, b: tuple(
                self._add(aten.where.self, condition, x, y)
                for x, y in zip(self._pair(a), self._pair(b), strict=True)
            ),
            aten._conj.default: self._conjugate,
            aten._conj_physical.default: self._conjugate,
            aten.conj_physical.default: self._conjugate,
            aten.resolve_conj.default: lambda pair: pair,
            aten.abs.default: lambda pair: self._add(aten.hypot.default, *pair),
            aten.angle.default: lambda pair: self._add(aten.atan2.default, pair[1], pair[0]),
            aten.exp.default: lambda pair: self._polar(self._add(aten.exp.default, pair[0]), pair[1]),
            aten._to_copy.default: self._cast,
        }

    def _unstacked(self, both: Node) -> Pair:
        return self._add(aten.select.int, both, -1, 0), self._add(aten.select.int, both, -1, 1)

    def _stacked(self, pair: Pair) -> Node:
        return self._add(aten.stack.default, list(pair), -1)

    def _polar(self, size: Any, angle: Any) -> Pair:
        turn = (self._add(aten.cos.default, angle), self._add(aten.sin.default, angle))
        return self._add(aten.mul.Tensor, size, turn[0]), self._add(aten.mul.Tensor, size, turn[1])

    def _product(self, times: Any, a: Any, b: Any) -> Pair:
        """(a + bi)(c + di), by half the products where one of the two is real."""
        if not isinstance(a, tuple | complex):
            c, d = self._pair(b)
            return self._add(times, a, c), self._add(times, a, d)
        real, imaginary = self._pair(a)
        if not isinstance(b, tuple | complex):
            return self._add(times, real, b), self._add(times, imaginary, b)
        c, d = self._pair(b)
        return (
            self._add(aten.sub.Tensor, self._add(times, real, c), self._add(times, imaginary, d)),
            self._add(aten.add.Tensor, self._add(times, real, d), self._add(times, imaginary, c)),
        )

    def _both(self, operation: Any, a: Any, b: Any) -> Pair:
        (a, b), (c, d) = self._pair(a), self._pair(b)
        return self._add(operation, a, c), self._add(operation, b, d)

    def _quotient(self, a: Any, b: Any) -> Pair:
        if not isinstance(b, tuple | complex):
            return tuple(self._add(aten.div.Tensor, part, b) for part in self._pair(a))  # type: ignore[return-value]
        c, d = self._pair(b)
        size = self._add(aten.add.Tensor, self._add(aten.mul.Tensor, c, c), self._add(aten.mul.Tensor, d, d))
        product = self._product(aten.mul.Tensor, a, self._conjugate((c, d)))
        return tuple(self._add(aten.div.Tensor, part, size) for part in product)  # type: ignore[return-value]

    def _joined(self, join: Any, values: list[Any], *dim: int) -> Pair:
        pairs = [self._pair(value) for value in values]
        real, imaginary = ([pair[index] for pair in pairs] for index in (0, 1))
        return self._add(join, real, *dim), self._add(join, imaginary, *dim)

    def _conjugate(self, pair: Pair) -> Pair:
        return pair[0], self._add(aten.neg.default, pair[1])

    def _cast(self, value: Any) -> Any:
        dtype: Any = self._node.kwargs.get("dtype")
        if dtype is not None and dtype not in PARTS:
            raise self._refusal()  # to a real type the imaginary part is dropped, of which torch warns
        options = {**self._node.kwargs, **({"dtype": PARTS[dtype]} if dtype else {})}
        return tuple(self._add(aten._to_copy.default, part, **options) for part in self._pair(value))

    def _pair(self, value: Any) -> Pair:
        """A complex value's parts; of a real one the imaginary part is zero."""
        if isinstance(value, tuple):
            return value
        if isinstance(value, Node):
            return value, self._add(aten.zeros_like.default, value)
        return complex(value).real, complex(value).imag

    def _add(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """An operator with the value that its fake arguments give, at the line of the node that it replaces."""
        added = self._node.graph.call_function(target, args, kwargs)
        known = {
            key: self._node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in self._node.meta
        }
        given = map_arg((args, kwargs), lambda node: node.meta["val"])
        added.meta = {**known, "val": target(*given[0], **given[1])}
        return added

    def _refusal(self) -> RefusedTechnique:
        frames = FRAME.findall(self._node.meta.get("stack_trace") or "")
        where = f" (line {frames[-1][1]} of {frames[-1][0].rpartition('/')[2]})" if frames else ""
        return RefusedTechnique(
            "complex numbers of this model have no real form here",
            found=f"there is no rule for {self._node.target} of complex numbers{where}",
        )


def _is_complex(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_complex()
