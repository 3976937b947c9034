# pyright: basic, reportMissingImports=false
"""The converter's own process: `PYTHON -I litert_convert.py GRAPH KEYS MODEL`, in an environment that has litert-torch.

It imports nothing of Torchwright, which need not be installed there. The last line that it prints is JSON: versions, or
what went wrong.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TAGGED = "tw"
"""The replacement for the module path in tensor names, with the key of their operator."""


def main(graph: str, keys: str, model: str) -> dict[str, Any]:
    """Convert a graph of torch.export's, its tensors flat and named by `keys`: name of a node → key."""
    import litert_torch
    import torch

    program = torch.export.load(graph)
    named = json.loads(Path(keys).read_text(encoding="utf-8"))
    for node in program.graph.nodes:
        if node.name in named:
            key = named[node.name].replace(".", ":")  # what is before a dot is left out
            node.meta["nn_module_stack"] = {"": ("", TAGGED), "operator": (key, TAGGED)}
    whole, tensors = flat(program)
    litert_torch.convert(whole, tensors).export(model)
    return {"litert-torch": litert_torch.__version__, "torch": str(torch.__version__)}


def flat(program: Any) -> tuple[Any, tuple[Any, ...]]:
    """The graph as a module from tensors to tensors, and its example's; what a module around it did would name all."""
    import torch
    from torch.fx.graph import CodeGen
    from torch.utils import _pytree as pytree

    module = program.module(check_guards=False)
    leaves = pytree.tree_leaves(program.example_inputs)
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    tensors: list[Any] = []
    for node, leaf in zip(inputs, leaves, strict=True):
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
        else:  # a constant, which the graph has in it
            assert not node.users
            module.graph.erase_node(node)
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    answer = pytree.tree_leaves(output.args, is_leaf=lambda leaf: isinstance(leaf, torch.fx.Node))
    output.args = (tuple(leaf for leaf in answer if isinstance(leaf, torch.fx.Node)),)
    module.graph.set_codegen(CodeGen())
    module.recompile()
    module.training = False
    return module, tuple(tensors)


def _message(error: BaseException) -> dict[str, Any]:
    """Describe the failure: the system's error number if it is the system's, such as a full disk."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, OSError) and error.errno:
        return {"errno": error.errno}
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return {"failed": f"{type(error).__name__}: {lines[0][:300] if lines else 'no message'}"}


if __name__ == "__main__":
    try:
        said = main(*sys.argv[1:])
    except Exception as failure:
        said = _message(failure)
    print("\n" + json.dumps(said), flush=True)
