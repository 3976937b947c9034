# pyright: basic
"""The dispatcher of an artifact's calls: its packages, or its graphs, compiled here or run operator by operator."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchwright.core.errors import first_line
from torchwright.core.paths import file_digest, private_cache
from torchwright.core.process import folders
from torchwright.core.records import Fingerprint, Recipe
from torchwright.optimization.artifact import folder as artifact
from torchwright.optimization.artifact.folder import GENERAL, ONE, ONE_GRAPH, ROWS, Manifest
from torchwright.optimization.engines.base import OTHER_MACHINE_ERROR, SAME_MACHINE_ERROR, Ready
from torchwright.optimization.engines.compiled.graphs import GraphCall, Later, graph_in
from torchwright.optimization.engines.compiled.package import Package
from torchwright.optimization.engines.dispatch.call import spec_of
from torchwright.optimization.engines.dispatch.call_dispatcher import CallDispatcher, CompiledCall
from torchwright.optimization.engines.dispatch.spec import CallSpec


@dataclass(frozen=True, kw_only=True)
class CompiledCalls:
    """The calls that an artifact keeps, and the user for whom it is opened."""

    path: Path
    recipe: Recipe
    manifest: Manifest
    here: Fingerprint
    trusted: bool
    """True if code that the graphs name may run."""
    original: Callable[..., Any] | None
    strict: bool
    say: Callable[[str], None]

    def packages(self, how: str) -> Ready:
        """The packages of the artifact."""
        made = self.recipe.fingerprint
        # On a busy machine trials run on fewer threads, and compile for any number.
        then, now = made.most_threads or made.threads, self.here.threads
        if self.manifest.threads is None and then != now:
            self.say(
                f"compiled for {then} threads, and this process has {now}: weights may lie in blocks that it has to "
                "rearrange at every call; an artifact made with as many threads as it runs on has none of that"
            )
        # Versions of before kept no specifications.
        programs = None if self.manifest.calls else self._programs()
        return self._behind_door(self.path / artifact.NATIVE, programs, how, SAME_MACHINE_ERROR)

    def graphs(self, *, compiled: bool) -> Ready | None:
        """Return the graphs, compiled if requested and possible; None without graphs."""
        from torchwright.hardware.measure.toolchain import compiler_fault

        if not (self.path / "programs.json").is_file():
            return None
        programs = self._programs()
        if compiled:
            fault = compiler_fault(self.here.device)
            if fault is None:
                try:
                    with self._recompiled(programs) as folder:
                        return self._behind_door(folder, programs, "recompiled graphs", OTHER_MACHINE_ERROR)
                except Exception as error:  # of Inductor or the C++ compiler, at a graph of another version
                    fault = f"compiling the graphs failed ({type(error).__name__}: {first_line(error)})"
            self.say(f"running uncompiled: {fault}")
        layouts = self.manifest.layouts
        dispatcher = self.dispatcher(
            [
                GraphCall(program, spec_of(name, program), layouts)
                for name, program in programs.items()
                if name not in (ROWS, GENERAL, ONE_GRAPH)
            ]
        )
        return Ready(how="graphs, uncompiled", run=dispatcher.run, dispatcher=dispatcher)

    def _programs(self, *names: str) -> dict[str, Any]:
        """The graphs of these names, without any all of them."""
        from torchwright.optimization.engines.compiled.program import read_programs

        return read_programs(self.path, trust=self.trusted, names=names or None)

    def _behind_door(
        self, folder: Path, programs: dict[str, Any] | None, how: str, tolerance: float
    ) -> Ready:
        """The packages in `folder`; `programs` are what they were made from, where the manifest does not say it."""
        layouts = self.manifest.layouts
        dispatcher = self.dispatcher(
            [
                Package(folder / file, self._spec(name, programs), layouts, self._graph_for(name))
                for name, file in self._files(programs)
            ]
        )
        return Ready(how=how, run=dispatcher.run, dispatcher=dispatcher, tolerance=tolerance)

    def _graph_for(self, name: str) -> Callable[[], CompiledCall] | None:
        """Makes the graph that answers calls outside a package's guards; None where the artifact has none."""
        if not (self.path / "programs.json").is_file() or (name == ONE and self.manifest.any_sizes is None):
            return None
        return functools.partial(graph_in, self.path, GENERAL if name == ONE else name, self.manifest.layouts)

    def _files(self, programs: dict[str, Any] | None) -> list[tuple[str, str]]:
        """(name of the call, file of its package) of what is compiled, or of what can be compiled from `programs`."""
        manifest = self.manifest
        names = [spec.name for spec in manifest.calls] or list(manifest.cases)
        found = artifact.packages(names, manifest.rows, manifest.one_row)
        return [(name, file) for name, file in found if programs is None or name in programs]

    def _spec(self, name: str, programs: dict[str, Any] | None) -> CallSpec:
        """Return the inputs that a compiled call takes: from the signed manifest, or from the graph that was compiled
        here.
        """
        manifest = self.manifest
        specs = (*manifest.calls, manifest.any_rows, manifest.one_row)
        kept = {spec.name: spec for spec in specs if spec is not None}
        if programs is None:
            return kept[name]
        spec = spec_of(name, programs[name])
        if name == ROWS and manifest.any_rows is not None:
            least = {size: bounds[0] for size, bounds in manifest.any_rows.sizes.items()}
            sizes = {
                size: (min(2, max(0, least.get(size, 2))), most) for size, (_, most) in spec.sizes.items()
            }
            spec = replace(spec, sizes=sizes)
        return spec

    def dispatcher(self, calls: Sequence[CompiledCall]) -> CallDispatcher:
        """Return the dispatcher of a user's calls, as far as `calls` or the artifact's graphs answer them."""
        manifest = self.manifest
        kept = ((GENERAL, manifest.any_sizes), (ONE_GRAPH, manifest.one_graph))
        general = [self._graph(name, spec) for name, spec in kept if spec is not None]
        pieces = manifest.takes.pieces and manifest.rows in ("pieces", "both")
        return CallDispatcher(
            calls,
            takes=replace(manifest.takes, pieces=pieces),
            by_rows=manifest.by_rows,
            general=general,
            original=self.original,
            device=self.here.device.kind,
            threads=manifest.threads,
            strict=self.strict,
        )

    def _graph(self, name: str, spec: CallSpec) -> Later:
        """The graph of this name, read when a call needs it."""
        return Later(spec, lambda: GraphCall(self._programs(name)[name], spec, self.manifest.layouts))

    # ------------------------------------------------------------------------------------------ compiling here

    @contextlib.contextmanager
    def _recompiled(self, programs: dict[str, Any]) -> Iterator[Path]:
        """A folder with this artifact's graphs compiled for this machine; in the user's cache, where that can be."""
        key = hashlib.sha256(
            f"{file_digest(self.path / artifact.MANIFEST)}{_code_key(self.here)}".encode()
        ).hexdigest()[:24]
        try:
            folder = private_cache("compiled") / key
            if folder.is_dir():
                yield folder
                return
            unfinished = f"{key}.unfinished-"
            folders.sweep(folder.parent, unfinished)
            temporary = folders.make(folder.parent, unfinished)
        except OSError as error:
            self.say(f"what is compiled here cannot be kept for the next time ({error})")
            with folders.temporary() as passing:  # loading unpacks the package elsewhere
                self._compile(programs, passing)
                yield passing
            return
        try:
            self._compile(programs, temporary.path)
            with contextlib.suppress(OSError):  # another process may have been faster
                temporary.path.rename(folder)
            yield folder if folder.is_dir() else temporary.path
        finally:
            temporary.remove()

    def _compile(self, programs: dict[str, Any], folder: Path) -> None:
        from torchwright.optimization.engines.compiled.program import compile_program

        settings = inductor_settings(self.recipe)
        for name, file in self._files(programs):
            compile_program(programs[name], folder / file, settings)


def inductor_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the Inductor settings that a recipe's steps ask for, without a model."""
    from torchwright.optimization.techniques.base import Target, from_step, in_order
    from torchwright.workloads.module import ModuleWorkload

    empty = nn.Identity()
    workload = ModuleWorkload(empty, (torch.zeros(1),))
    target = Target(model=empty, workload=workload, device=recipe.fingerprint.device, properties=set())
    for step in in_order(recipe.steps):
        technique = from_step(step)
        if technique.gives & {"compiled"} or (technique.needs & {"compiled"} and not technique.removes):
            technique.apply(target)
    return target.settings.inductor


def _code_key(here: Fingerprint) -> str:
    return f"{here.torch}|{here.device.name}|{sorted(here.device.isa)}|{here.threads}"
