"""Steps for some of a model's components alone: what they can bring, and when the whole model has it better."""

from __future__ import annotations

from torchwright.core.records import CLEARLY, Step
from torchwright.optimization.search.state import COMPANY, Search
from torchwright.optimization.techniques.base import Technique, from_step

HIDDEN = 0.02
"""A saving of at most this share of a pass cannot be distinguished from noise."""


def in_pass(search: Search, technique: Technique, gain: float) -> float:
    """Return the gain of a whole pass from the gain of a technique's components (Amdahl, 1967)."""
    share = _share(search, technique.components)
    return 1 / (1 - share + share / gain)


def cannot_pay(search: Search, technique: Technique, step: Step) -> str | None:
    """Why a step for some components is not worth a trial, or None.

    The whole model is tried first, which shows what each component gains. Where the whole was kept, and no other
    component lost by it, a part loses less.
    """
    named = technique.components
    if not named or search.budget.objective == "memory":
        return None
    names, share, whole = ", ".join(named), _share(search, named), _for_all(step)
    seen = search.component_gains.get(str(whole), {})
    found = [seen[name] for name in named if name in seen]
    saved = max(share * (1 - COMPANY / max(found)), 0.0) if found else share
    if saved <= HIDDEN:
        gained = f"gained {max(found):.2f}x by {whole} and " if found else ""
        return (
            f"{names} {gained}takes {share:.1%} of a pass, of which it may save {saved:.1%}: up to {HIDDEN:.0%} is "
            "lost in the noise"
        )
    kept = next((k for k in search.best.steps if k.name == step.name and not from_step(k).components), None)
    if kept is None or any(gain < 1 / CLEARLY for name, gain in seen.items() if name not in named):
        return None
    return f"the whole model has it ({kept}), and no other component is slower for that"


def _for_all(step: Step) -> Step:
    """The same step for the whole model."""
    return Step(name=step.name, options={key: value for key, value in step.options.items() if key != "parts"})


def _share(search: Search, named: tuple[str, ...]) -> float:
    """Return the share of the best recipe's time that is spent in calls of these components; 1 without any."""
    seconds = (search.best if search.best.turns else search.baseline).component_seconds()
    if not named or not seconds:
        return 1.0
    return sum(seconds.get(name, 0.0) for name in named) / max(sum(seconds.values()), 1e-12)
