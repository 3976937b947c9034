"""Which attention kernel runs."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import nn

from torchwright.core.errors import RefusedTechnique
from torchwright.core.records import Coverage
from torchwright.hardware.measure.toolchain import compiler_fault
from torchwright.optimization.techniques.base import Phase, Target, Technique
from torchwright.optimization.techniques.shared.blocked_attention import (
    BlockedAttention,
    CannotCall,
    Site,
    find_sites,
)
from torchwright.optimization.techniques.shared.function_attention import (
    NAMES,
    FunctionAttention,
    Modification,
)
from torchwright.optimization.techniques.shared.wrapping import (
    TOLERANCE,
    outputs,
    replace_module,
    worst_error,
)

NO_CALL = "no module of the model calls scaled_dot_product_attention"


@dataclass(frozen=True, kw_only=True)
class SwitchAttention(Technique):
    """Switch a transformers model's attention, or leave out what a constant mask hides (windows, tiles)."""

    name: ClassVar[str] = "attention"
    phase: ClassVar[Phase] = Phase.ATTENTION
    needs: ClassVar[frozenset[str]] = frozenset({"eager"})

    implementation: Literal["sdpa", "eager", "blocked", "flex"] = "sdpa"
    """`sdpa`: torch's fused kernel; `eager`: plain matrix products, which Inductor may fuse; `blocked`: SDPA on the
    blocks that a constant mask leaves visible; `flex`: FlexAttention, with the functions that the model has as
    `score_mod` and `mask_mod` in the place of its masks."""

    def variants(self, target: Target) -> Iterable[Self]:
        models = switchable(target.model)
        if modifications(target.model):
            yield replace(self, implementation="flex")
        if not models:
            yield replace(self, implementation="blocked")
        elif any(used_by(model) != "sdpa" for model in models):
            yield replace(self, implementation="sdpa")

    def refuse(self, target: Target) -> str | None:
        if self.implementation == "blocked":
            sites = _sites(target)
            return _no_site(sites) if sites is not None else None
        if self.implementation == "flex":
            if fault := compiler_fault(target.device):
                return f"uncompiled, FlexAttention computes every score: {fault}"
            if target.device.kind == "cpu" and not torch.cpu._is_avx2_supported():
                return "torch compiles FlexAttention for CPUs from AVX2 on"
            return None if modifications(target.model) else "the model has no score_mod or mask_mod"
        models = switchable(target.model)
        if not models:
            return "the model is not one of transformers', whose attention can be switched"
        if all(used_by(model) == self.implementation for model in models):
            return f"the model uses {self.implementation} already"
        return None

    def apply(self, target: Target) -> None:
        cases = target.workload.cases(target.compute_dtype)
        before = outputs(target.model, cases)
        original = target.model
        if self.implementation == "blocked":
            undo, coverage = self._block(target, cases)
        elif self.implementation == "flex":
            undo, coverage = [], self._use_functions(target, cases)
        else:
            undo, coverage = self._switch(target)
        error, limit = worst_error(before, outputs(target.model, cases)), TOLERANCE[target.compute_dtype]
        if error > limit:
            target.model = original
            for old, new in undo:
                if self.implementation == "blocked":
                    replace_module(original, new, old)
                else:
                    old.set_attn_implementation(new)
            raise RefusedTechnique(
                f"attention:implementation={self.implementation} computes something else here",
                found=f"the outputs change by {error:.1e}, {limit:.0e} is allowed",
            )
        target.coverage.append(coverage)

    def _switch(self, target: Target) -> tuple[list[tuple[Any, Any]], Coverage]:
        models = switchable(target.model)
        undo = [(model, used_by(model)) for model in models]
        try:
            for model in models:
                model.set_attn_implementation(self.implementation)
        except ValueError as error:
            raise RefusedTechnique("transformers does not switch this model", found=str(error)) from error
        changed = sum(used_by(model) == self.implementation for model in models)
        return undo, Coverage(
            technique=self.name,
            changed=changed,
            total=len(models),
            unit="transformers models",
            kernel=self.implementation,
            skipped={type(model).__name__: f"it stays with {used_by(model)}" for model in models
                     if used_by(model) != self.implementation},
        )  # fmt: skip

    def _use_functions(self, target: Target, cases: Sequence[Any]) -> Coverage:
        functions = modifications(target.model)
        model = FunctionAttention(target.model, functions)
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # that FlexAttention is slow before it is compiled; it says so once
            outputs(model, cases)
        if not model.calls:
            raise RefusedTechnique("FlexAttention changes nothing here", found=NO_CALL)
        target.model = model
        return Coverage(
            technique=self.name,
            changed=model.calls,
            total=model.calls,
            unit="calls of attention",
            kernel=f"FlexAttention with the model's {' and '.join(functions)}",
        )

    def _block(self, target: Target, cases: Sequence[Any]) -> tuple[list[tuple[Any, Any]], Coverage]:
        sites = find_sites(target.model, cases)
        chosen = [site for site in sites if site.reason is None]
        if not chosen:
            raise RefusedTechnique("attention in blocks changes nothing here", found=_no_site(sites))
        undo = []
        for site in chosen:
            wrapper = BlockedAttention(site.module, site.blocked)
            undo.append((site.module, wrapper))
            if site.module is target.model:
                target.model = wrapper
            else:
                replace_module(target.model, site.module, wrapper)
        shares = [mask.share for site in chosen for mask in site.blocked]
        return undo, Coverage(
            technique=self.name,
            changed=len(chosen),
            total=len(sites),
            unit="modules with attention",
            kernel=f"SDPA on {sum(shares) / len(shares):.0%} of the products",
            skipped={site.name: site.reason for site in sites if site.reason},
        )


def switchable(model: nn.Module) -> list[Any]:
    """The outermost transformers models in `model`."""
    # A model of transformers cannot exist before its base class does: importing it to ask takes seconds, and fails
    # with a broken torchvision.
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:
        return []
    found: list[Any] = []
    inside: set[int] = set()
    for module in model.modules():
        if isinstance(module, modeling.PreTrainedModel) and id(module) not in inside:
            found.append(module)
            inside |= {id(child) for child in module.modules()}
    return found


def modifications(model: nn.Module) -> dict[str, Modification]:
    """FlexAttention's functions that the outermost module with any has."""
    for module in model.modules():
        found: dict[str, Any] = {name: getattr(module, name) for name in NAMES if hasattr(module, name)}
        if found:
            return found
    return {}


def used_by(model: Any) -> str:
    """The attention implementation of a transformers model."""
    return model.config._attn_implementation or "eager"


def _sites(target: Target) -> list[Site] | None:
    """Return where the model calls attention, or None if that cannot be seen before the model is adapted."""
    try:
        return find_sites(target.model, target.workload.cases(target.compute_dtype))
    except CannotCall:
        # The workload's calls are those of its adapted form, which the user's own model need not take.
        return None


def _no_site(sites: Sequence[Site]) -> str | None:
    if any(site.reason is None for site in sites):
        return None
    if not sites:
        return NO_CALL
    reasons = sorted({site.reason for site in sites if site.reason})
    return f"none of {len(sites)} modules with attention has a constant sparse mask: {'; '.join(reasons)}"
