# pyright: basic, reportAttributeAccessIssue=false, reportPrivateImportUsage=false
"""Running a target through torch.compile, and building ahead-of-time packages of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from torchwright.engines import compile_package
from torchwright.engines.call import NotPlain, spec_of
from torchwright.engines.program import (
    compile_program,
    export,
    functional,
    ignore_library_warnings,
    write_programs,
)
from torchwright.engines.spec import CallSpec
from torchwright.errors import RefusedTechnique, TorchwrightError, first_line
from torchwright.techniques.base import Settings, Target
from torchwright.techniques.shared.blocks import repeated_blocks
from torchwright.workloads.base import Case

RECOMPILE_LIMIT = 8
"""torch's own limit, after which Dynamo falls back to eager without a word; here it is a failure."""


class RecompileStorm(TorchwrightError):
    """torch.compile kept recompiling: the model's shapes or Python values change at every call."""


class JitRunner:
    """Calls the model through torch.compile; settings are patched around every call that may compile."""

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self.model, self.settings = model, settings
        if settings.regional:
            self._compiled: Callable[..., Any] = compile_regions(model, settings)
        else:
            self._compiled = torch.compile(model, dynamic=settings.dynamic, mode=settings.mode)

    def __call__(self, case: Case) -> Any:
        with torch._inductor.config.patch(self.settings.inductor), ignore_library_warnings():
            return self._compiled(*case.args, **case.kwargs)

    @staticmethod
    def check_compiled() -> None:
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

    @staticmethod
    def recompiles() -> int:
        """Compilations of one frame beyond its first, over the whole process.

        Raises `RecompileStorm` at the limit after which Dynamo would run eagerly in silence.
        """
        counts = torch._dynamo.utils.guard_failures
        most = max((len(reasons) for reasons in counts.values()), default=0)
        if most >= RECOMPILE_LIMIT:
            raise RecompileStorm(
                f"torch.compile recompiled one function {most} times",
                found=str(next(iter(counts.values()))[-1])[:200],
                next="give the shapes that occur as a list of inputs, or use dynamic=true",
            )
        return most


def build_packages(target: Target, folder: Path, cases: Sequence[Case]) -> list[CallSpec]:
    """Export and compile every case into `folder`; keeps the portable graphs beside the packages.

    Returns what each call takes. Raises `RefusedTechnique` when the model does not export.
    """
    programs = {
        name: rewritten(program, target.settings) for name, program in export(target.model, cases).items()
    }
    specs = [described(name, program) for name, program in programs.items()]
    write_programs(folder, programs)
    packages = list(enumerate(programs.items()))
    inductor = target.settings.inductor
    # Compilation is one thread's work, so graphs are compiled side by side; measuring kernels meanwhile would not do.
    apart = [] if inductor.get("max_autotune") else packages[1:]
    started = [compile_package.start(folder, name, index, inductor) for index, (name, _) in apart]
    try:
        for index, (_, program) in packages[: len(packages) - len(apart)]:
            compile_program(program, folder / f"package-{index}.pt2", inductor)
        for process in started:
            compile_package.finish(process)
    finally:
        for process in started:
            process.kill()
            process.wait()
    return specs


def rewritten(program: ExportedProgram, settings: Settings) -> ExportedProgram:
    """The graph with what the recipe changes in every graph: in its functional form, where anything is changed."""
    if settings.rewrites:
        program = functional(program)
    for rewrite in settings.rewrites:
        rewrite(program.graph_module)
    return program


def described(name: str, program: ExportedProgram) -> CallSpec:
    """`spec_of`, with a graph that plain data cannot describe as a refusal."""
    try:
        return spec_of(name, program)
    except NotPlain as error:
        raise RefusedTechnique(
            "the exported graph's inputs cannot be described",
            found=str(error),
            allowed="sizes that are numbers, or free by themselves",
            next="engine=jit compiles it as it is called",
        ) from error


def compile_regions(model: nn.Module, settings: Settings) -> nn.Module:
    """Compile each repeated block once and reuse its code for all of its copies (torch's regional compilation)."""
    compiled = torch.compile(_call, dynamic=settings.dynamic, mode=settings.mode)
    for block in repeated_blocks(model):
        block._compiled_call_impl = functools.partial(compiled, block)
    return model


def _call(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What a block does when it is called. `Module.compile` of a class of torch.nn, such as Sequential, does nothing:
    its code is of those files that Dynamo does not look into unless they are called from another."""
    return block._call_impl(*args, **kwargs)
