# pyright: basic, reportAttributeAccessIssue=false, reportPrivateImportUsage=false
"""Running a model through torch.compile."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import nn

from torchwright.core import nested
from torchwright.core.errors import RefusedTechnique, TorchwrightError, first_line
from torchwright.optimization.engines.base import NATIVE, Engine, Kept, Ready, ShippingForm
from torchwright.optimization.engines.compiled.compiler_caches import use_private_caches
from torchwright.optimization.engines.compiled.machine_code import keep_machine_code, restore_machine_code
from torchwright.optimization.engines.compiled.program import ignore_library_warnings
from torchwright.optimization.engines.dispatch.guards import holds_nan, holds_not_finite
from torchwright.optimization.techniques.base import Settings, Target
from torchwright.optimization.techniques.shared.blocks import repeated_blocks
from torchwright.workloads.base import Case

GRAPHS, CODE = "cache.bin", "code.zip"
"""torch's caches of compiled graphs, and the C++ compiler's output for them."""
GRAPHS_RECORDED = "reduce-overhead"
"""The mode in which torch.compile records CUDA graphs: what a call returns is overwritten by the next one."""
RECOMPILE_LIMIT = 8
"""torch's own limit, after which Dynamo falls back to eager without a word; here it is a failure."""
NOT_KEPT = "nothing of what torch compiled can be kept here: who loads this compiles again at the first call"


class RecompileStorm(TorchwrightError):
    """torch.compile kept recompiling: the model's shapes or Python values change at every call."""


class Jit(Engine):
    """Calls the model through torch.compile; settings are patched around every call that may compile."""

    name: ClassVar[str] = "jit"
    how: ClassVar[str] = "torch.compile"
    cache: ClassVar[tuple[str, ...]] = (GRAPHS, CODE)

    def __init__(self, model: nn.Module, settings: Settings, example: Sequence[Case] = ()) -> None:
        # Of what this module is imported for, only this needs Inductor.
        from torchwright.optimization.engines.compiled.byte_reductions import exact_reductions

        self.settings, self._model = settings, model
        self._exact = exact_reductions()
        self._excluded = _excluded(model, settings, example)
        use_private_caches()
        if settings.regional:
            self._compiled: Callable[..., Any] = compile_regions(model, settings)
        else:
            self._compiled = torch.compile(model, dynamic=settings.dynamic, mode=settings.mode)

    @classmethod
    def prepare(cls, target: Target, folder: Path | None = None) -> Self:
        return cls(target.model, target.settings, target.workload.cases(target.compute_dtype))

    def __call__(self, case: Case) -> Any:
        if self.settings.parts and case.part not in self.settings.parts:
            return self._model(*case.args, **case.kwargs)
        if self._leaves_domain(case):
            with torch.compiler.set_stance("force_eager"):  # regions are compiled in the model itself
                return self._model(*case.args, **case.kwargs)
        with torch._inductor.config.patch(self._exact | self.settings.inductor), ignore_library_warnings():
            outputs = self._compiled(*case.args, **case.kwargs)
        if self.settings.mode == GRAPHS_RECORDED:
            return nested.map_tensors(torch.clone, outputs)
        return outputs

    def _leaves_domain(self, case: Case) -> bool:
        """Check whether an input holds what compiled code drops, as `guards.compiled_domain` says of graphs."""
        if self._excluded is None:
            return False
        return any(leaf.is_cpu and self._excluded(leaf) for leaf in _floats(case))

    def check(self) -> None:
        """Raise `RefusedTechnique` where Dynamo compiled nothing in this process, and runs the original in silence."""
        counts = torch._dynamo.utils.counters
        if counts["stats"]["unique_graphs"]:
            return
        reasons = [*counts["unimplemented"], *counts["graph_break"]]
        reason = first_line(Exception(reasons[-1])) if reasons else "Dynamo gives no reason"
        raise RefusedTechnique(
            "torch.compile compiled nothing of this model",
            found=f"torch.compile compiled nothing of it: {reason}",
        )

    def recompiles(self) -> int:
        """Compilations of one frame beyond its first, over the whole process.

        Raises `RecompileStorm` at the limit after which Dynamo would run eagerly in silence.
        """
        # Each compilation adds a reason for every one before it, which begins with that one's number.
        found = {
            len({reason.partition(":")[0] for reason in reasons}): reasons
            for reasons in torch._dynamo.utils.guard_failures.values()
        }
        most = max(found, default=0)
        if most >= RECOMPILE_LIMIT:
            raise RecompileStorm(
                f"torch.compile recompiled one function {most} times",
                found=str(found[most][-1])[:200],
                next="give the shapes that occur as a list of inputs, or use dynamic=true",
            )
        return most

    @classmethod
    def ways(cls, own: ShippingForm) -> dict[ShippingForm, str]:
        return {"package": "aot", own: cls.name}

    def keep(self, folder: Path) -> str | None:
        """Restore what torch.compile compiled in this process, for a rebuilt model; a failure costs only time."""
        return keep_compiled(folder / NATIVE)

    @classmethod
    def load(cls, kept: Kept) -> Ready | None:
        return kept.graphs(compiled=True)

    @classmethod
    def restore(cls, folder: Path) -> None:
        """Let torch.compile find what it compiled when the artifact was made."""
        restore_compiled(folder)


def _excluded(
    model: nn.Module, settings: Settings, example: Sequence[Case]
) -> Callable[[torch.Tensor], bool] | None:
    """Return the check for values that compiled code drops, or None where it drops none.

    With freezing, oneDNN computes layers with their ReLU, which drops NaN. Integers hold neither NaN nor infinity; that
    of the example, as in a mask, was compared.
    """
    # It imports torch's quantization, which loading does not need.
    from torchwright.optimization.techniques.shared.int8 import Int8Layer

    integers = any(isinstance(module, Int8Layer) and module.activation for module in model.modules())
    if integers and not any(bool(leaf.isinf().any()) for case in example for leaf in _floats(case)):
        return holds_not_finite
    return holds_nan if integers or settings.inductor.get("freezing") else None


def _floats(case: Case) -> list[torch.Tensor]:
    leaves = nested.leaves((case.args, case.kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def keep_compiled(folder: Path) -> str | None:
    """Write what torch.compile compiled in this process, for `Jit.restore`; why nothing can be kept, or None."""
    try:
        graphs = torch.compiler.save_cache_artifacts()
        if graphs is not None:
            (folder / GRAPHS).write_bytes(graphs[0])
        code = keep_machine_code(folder / CODE)
    except Exception:  # of torch's cache, whatever was compiled
        return NOT_KEPT
    return None if code or graphs is not None else NOT_KEPT


def restore_compiled(folder: Path) -> str | None:
    """Let torch.compile find what `keep_compiled` wrote; return the reason if torch cannot read it."""
    use_private_caches()
    read = True
    if (folder / GRAPHS).is_file():
        read = torch.compiler.load_cache_artifacts((folder / GRAPHS).read_bytes()) is not None
    if (folder / CODE).is_file():
        restore_machine_code(folder / CODE)
    return None if read else f"torch cannot read its graphs ({GRAPHS}): damaged, or of another version"


def compile_regions(model: nn.Module, settings: Settings) -> nn.Module:
    """Compile each repeated block once and reuse its code for all of its copies (torch's regional compilation)."""
    compiled = torch.compile(_call, dynamic=settings.dynamic, mode=settings.mode)
    for block in repeated_blocks(model):
        block._compiled_call_impl = functools.partial(compiled, block)
    return model


def _call(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Return the function that a block's call runs. `Module.compile` of a torch.nn class such as Sequential does
    nothing: its code is in files that Dynamo skips unless they are called from another."""
    return block._call_impl(*args, **kwargs)
