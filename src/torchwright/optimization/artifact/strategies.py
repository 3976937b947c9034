# pyright: basic
"""The strategies for running an artifact: load what its engine can, or rebuild its model with the recipe's steps."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from torchwright.core.errors import ArtifactError, RefusedTechnique, SlowerCall
from torchwright.core.records import Recipe
from torchwright.hardware.devices import get_device
from torchwright.hardware.devices.allocator import FROM_THE_START, apply_allocator, is_there, started_with
from torchwright.optimization.artifact import folder as artifact
from torchwright.optimization.artifact.compiled import CompiledCalls
from torchwright.optimization.artifact.fingerprint import fingerprint_here
from torchwright.optimization.artifact.folder import Manifest
from torchwright.optimization.engines.base import Ready, engines
from torchwright.optimization.engines.dispatch.call_dispatcher import CallDispatcher, CompiledCall
from torchwright.optimization.engines.eager import Eager
from torchwright.workloads.base import class_of, fresh


class ArtifactLoader:
    """An artifact whose files are whole, as it is opened here for one caller. Engines see it as `Kept`."""

    def __init__(
        self,
        path: Path,
        recipe: Recipe,
        manifest: Manifest,
        *,
        trust: bool,
        process: bool,
        original: nn.Module | None,
        strict: bool,
    ) -> None:
        self.path, self.recipe, self.manifest = path, recipe, manifest
        self.engine = engines.get(manifest.engine)
        self.threads, self.calls = manifest.threads, manifest.calls
        self.notices: list[str] = []
        here = fingerprint_here(recipe.fingerprint.device.kind, measured=False)
        self.facts, self.device = here.device, here.device.kind
        get_device(self.device).start()
        self.refusal = artifact.same_machine(recipe.fingerprint, here)
        self.trusted, self._process = trust or artifact.is_own(path), process
        if self.refusal is None and not self.trusted:
            self.refusal = (
                "it was not built by this user on this machine (trust, or --trust, loads it all the same)"
            )
        self._calls = CompiledCalls(
            path=path,
            recipe=recipe,
            manifest=manifest,
            here=here,
            trusted=self.trusted,
            original=None if original is None else _later_called(original),
            strict=strict,
            say=self.say,
        )

    def best(self, model: nn.Module | None) -> Ready:
        """The fastest way that this machine and the caller's trust allow, or the recipe on the caller's `model`."""
        self._settle_process()
        if reason := self.engine.unavailable():
            return self._without_library(reason, model)
        if model is not None and not self.engine.whole:
            return self._replay(model)
        ready = self.engine.load(self)
        if ready is not None:
            if self.manifest.measured_on_module:
                self.say(
                    "the exported graph answers; the recipe was measured on the caller's module: "
                    "tw.load(DIR, model=…)"
                )
            return ready
        if not self.manifest.self_contained:
            raise ArtifactError(
                f"{self.path} holds no model: its recipe is for a module of your own",
                found=f"{self.recipe.workload.get('model')}, at {self.recipe.speedup} of the original's speed",
                next="pass your own: tw.load(DIR, model=fresh_module) replays the recipe on it",
            )
        return self._rebuild()

    def _without_library(self, reason: str, model: nn.Module | None) -> Ready:
        """Answer by the graphs that the artifact carries, in PyTorch's operators, where its engine cannot run.

        Raises `ArtifactError` where the artifact carries none, or for a `model` of the caller's, whose weights the
        graphs do not have.
        """
        ready = None if model is not None else self.engine.load_fallback(self)
        if ready is None:
            self.engine.available(str(self.path), ArtifactError)
        assert ready is not None
        notice = f"the graphs in PyTorch's own operators answer, not {self.engine.how}: {reason}"
        self.say(notice)
        warnings.warn(f"{self.path}: {notice}", SlowerCall, stacklevel=2)
        return ready

    def say(self, notice: str) -> None:
        self.notices.append(notice)

    def packages(self, how: str) -> Ready:
        return self._calls.packages(how)

    def dispatcher(self, calls: Sequence[CompiledCall]) -> CallDispatcher:
        return self._calls.dispatcher(calls)

    def graphs(self, *, compiled: bool) -> Ready | None:
        return self._calls.graphs(compiled=compiled)

    def _settle_process(self) -> None:
        """Change what the recipe changes of the whole process, unless the caller refuses it."""
        for step in self.recipe.steps:
            if step.name != "allocator":
                continue
            if not self._process:
                self.say("process=False: this process goes on handing freed memory back")
                return
            kind = str(step.options.get("kind", "retain"))
            if kind in FROM_THE_START:
                if not is_there(kind):
                    self.say(
                        f"the recipe was timed in a process with {kind}, and this one was started without it: "
                        f"{started_with(kind)}"
                    )
                return
            apply_allocator(kind)
            self.say(
                "this process keeps freed memory from now on, as the recipe wants it; "
                "tw.load(…, process=False) does without"
            )

    def _rebuild(self) -> Ready:
        from torchwright.optimization.engines.apply import apply_steps, make_target
        from torchwright.workloads.detect import from_description

        folder = self.path / artifact.MODEL
        described = self.recipe.workload
        described = described | dict.fromkeys(class_of(described).opens)  # nothing is judged here
        workload = from_description(described, folder if folder.is_dir() else None, trust=self.trusted)
        target = make_target(workload, self.facts)
        apply_steps(target, self.recipe.steps)
        if not self.recipe.steps:
            target.model = workload.adapt(target.model)
        return self._prepared(target)

    def _replay(self, model: nn.Module) -> Ready:
        from torchwright.optimization.artifact.tree import read_self_test
        from torchwright.optimization.engines.apply import apply_steps, make_target
        from torchwright.workloads.module import ModuleWorkload

        has_inputs = (self.path / "selftest.json").is_file()  # of a class of their own they cannot be kept
        kept = read_self_test(self.path / "selftest") if has_inputs else {"args": (), "kwargs": {}}
        workload = ModuleWorkload(model, kept["args"] or kept["kwargs"])
        target = make_target(workload, self.facts)
        how = "the recipe on the caller's model"
        if not self.recipe.steps:  # the original, with nothing around it that would cost a microsecond
            here = self.device == "cpu"  # elsewhere tensors have to be brought to it
            return Ready(how=how, run=Eager(target.model), answers=target.model if here else None)
        try:
            apply_steps(target, self.recipe.steps)
        except TypeError as error:
            if has_inputs:
                raise
            raise ArtifactError(
                "the recipe cannot be replayed without inputs, and the model's own are nothing that a file can keep",
                found=str(error),
                next="call result.model in the process that optimized it",
            ) from error
        except RefusedTechnique as error:
            raise ArtifactError(
                "the recipe cannot be replayed on this model", found=error.found or error.summary
            ) from error
        return replace(self._prepared(target), how=how)

    def _prepared(self, target: Any) -> Ready:
        """A rebuilt model, with the parts kept from an earlier preparation."""
        engine, native = engines.get(target.settings.engine).stand_in(), self.path / artifact.NATIVE
        if any((native / name).is_file() for name in engine.cache):
            if self.refusal is None:
                engine.restore(native)
            else:
                self.say(f"compiled cache left aside: {self.refusal}; compiling afresh")
        return Ready(how=engine.how, run=engine.prepare(target))


def _later_called(module: nn.Module) -> Callable[..., Any]:
    """A copy of the caller's module in eval mode, made when it is first called."""
    make = functools.cache(lambda: fresh(module))
    return lambda *args, **kwargs: make()(*args, **kwargs)
