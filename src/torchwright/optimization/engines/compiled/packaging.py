# pyright: basic, reportPrivateUsage=false
"""Building ahead-of-time packages of a target."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.export import ExportedProgram
from torch.fx import Node

from torchwright.core.errors import RefusedTechnique
from torchwright.optimization.engines.compiled import compile_package
from torchwright.optimization.engines.compiled.program import (
    compile_program,
    export,
    functional,
    write_programs,
)
from torchwright.optimization.engines.dispatch.call import NotPlain, spec_of
from torchwright.optimization.engines.dispatch.guards import compiled_domain, guards_of
from torchwright.optimization.engines.dispatch.input_capabilities import tensors_of
from torchwright.optimization.engines.dispatch.spec import CallSpec, package_file
from torchwright.optimization.engines.rewrites.layout import lay_out_additions, lay_out_rows
from torchwright.optimization.techniques.base import Settings, Target
from torchwright.workloads.base import Case


def build_packages(target: Target, folder: Path) -> list[CallSpec]:
    """Export and compile every call into `folder`; keeps the portable graphs next to the packages.

    Returns the inputs of each call. Raises `RefusedTechnique` if the model does not export, or parts are excluded
    from compiling.
    """
    if target.settings.parts:
        raise RefusedTechnique(
            "packages hold the whole model",
            found=f"only {', '.join(target.settings.parts)} is compiled: the rest is made anew where it is loaded",
        )
    cases = target.workload.graphs(target.compute_dtype)
    programs = {
        name: rewritten(program, target.settings) for name, program in export(target.model, cases).items()
    }
    specs = [
        guarded(described(case.name, programs[case.name]), programs[case.name], case, target)
        for case in cases
    ]
    write_programs(folder, programs)
    packages = list(enumerate(programs.items()))
    inductor = target.settings.inductor
    # Compilation is one thread's work, so graphs are compiled side by side; measuring kernels meanwhile would not do.
    apart = [] if inductor.get("max_autotune") else packages[1:]
    started = [compile_package.start(folder, name, index, inductor) for index, (name, _) in apart]
    try:
        for index, (_, program) in packages[: len(packages) - len(apart)]:
            compile_program(program, folder / package_file(index), inductor)
        for process in started:
            compile_package.finish(process)
    finally:
        for process in started:
            process.kill()
            process.wait()
    return specs


def rewritten(program: ExportedProgram, settings: Settings) -> ExportedProgram:
    """The graph as it is compiled: with the recipe's changes, and what layers read laid out for them."""
    program = changed(program, settings)
    lay_out_rows(program.graph_module)
    lay_out_additions(program.graph_module)
    return program


def changed(program: ExportedProgram, settings: Settings) -> ExportedProgram:
    """The graph with what the recipe changes in every graph, in its functional form where that is anything."""
    if settings.rewrites:
        program = functional(program)
    for rewrite in settings.rewrites:
        rewrite(program.graph_module)
    name_outputs(program)
    return program


def name_outputs(program: ExportedProgram) -> None:
    """Give the signature the names of the nodes that the graph returns: a rewrite may have replaced the last one."""
    returned: Any = next(iter(reversed(program.graph.nodes))).args[0]
    for spec, node in zip(program.graph_signature.output_specs, returned, strict=True):
        if isinstance(node, Node):
            spec.arg.name = node.name


def guarded(spec: CallSpec, program: ExportedProgram, case: Case, target: Target) -> CallSpec:
    """A call that is compiled, with the guards of its number domain. `case` is the example's."""
    if target.device.kind != "cpu":
        return spec
    freezing = bool(target.settings.inductor.get("freezing"))
    domain = compiled_domain(program, freezing=freezing)
    return replace(spec, guards=guards_of(program, tensors_of(case), domain))


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
