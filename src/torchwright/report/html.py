"""The recipe as one self-contained HTML page: no script, nothing loaded from anywhere."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torchwright.core.records import Coverage, Recipe, StepResult, to_json
from torchwright.report import figures, view, wording
from torchwright.report.pictures import PictureRow, source

if TYPE_CHECKING:
    from jinja2 import Environment

_OBJECTIVES = {
    "latency": "the time of one pass over the workload's calls",
    "throughput": "the time of one pass over the workload's calls, all of them at the batch size given",
    "memory": "the peak memory of the process",
}


def render(recipe: Recipe, pictures: Sequence[PictureRow] = ()) -> str:
    """The page of `recipe`, with what it and the original made side by side; the same of both give the same text.

    Every string in the recipe is escaped, and a content security policy lets the page load and run nothing.
    """
    page, folded = environment().get_template("report.html.j2"), view.folded(recipe)
    return page.render(
        recipe=recipe,
        name=view.model_name(recipe),
        machine=view.machine(recipe),
        headline=view.headline(recipe),
        verdict=view.verdict(recipe),
        stages=view.stages(recipe),
        folded=folded,
        fold=view.fold(folded),
        more=view.more(recipe),
        cases=view.case_pairs(recipe),
        shares=view.shares(recipe),
        rankings=view.rankings(recipe),
        runs_as=view.runs_as(recipe),
        needs_module=view.needs_module(recipe),
        rows=view.row_times(recipe),
        rates=view.rates(recipe),
        example_rows=view.example_rows(recipe),
        process=view.process_gain(recipe),
        quality=recipe.final.quality,
        over=view.over_budget(recipe.final.quality, recipe),
        pictures=pictures,
        objective=_OBJECTIVES[recipe.budget.objective],
        waterfalls=[figures.waterfall(recipe), figures.waterfall(recipe, width=figures.NARROW)],
        plates=[
            ("Speed against loss", figures.speed_against_loss(recipe)),
            ("Roofline", figures.roofline(recipe)),
            ("Memory", figures.memory(recipe)),
            ("Calls", figures.cases(recipe)),
        ],
        coverage=[
            (number, rung, cover) for number, rung in view.numbered(recipe) for cover in _own_coverage(rung)
        ],
        json=to_json(recipe),
    )


@functools.cache
def environment() -> Environment:
    """Return the templates of this folder, compiled once: everything put into them is escaped."""
    # Searches and training runs import this module at their start, and write a page at their end.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    made = Environment(
        loader=PackageLoader("torchwright.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    filters: dict[str, Any] = {
        "seconds": wording.seconds,
        "size": wording.size,
        "percent": wording.percent,
        "ratio": wording.ratio,
        "bounds": wording.bounds,
        "three": wording.three,
        "number": wording.number,
        "payback": _payback,
        "reason": view.reason,
        "so_far": view.so_far,
        "source": source,
        "by_reason": _by_reason,
    }
    made.filters.update(filters)  # pyright: ignore[reportUnknownMemberType]
    return made


def _finalize(value: Any) -> Any:
    """Text from compilers and users without control characters; None as a dash."""
    if value is None:
        return wording.MISSING
    return wording.clean(value) if type(value) is str else value


def _own_coverage(rung: StepResult) -> list[Coverage]:
    """Return what the row's own step changed: the steps before it have rows of their own."""
    own = [cover for cover in rung.coverage if cover.technique == rung.step.name]
    return own[-1:] or [*rung.coverage]


def _payback(rung: StepResult) -> str:
    return view.payback(rung) or wording.MISSING


def _by_reason(cover: Coverage) -> list[tuple[str, list[str]]]:
    """The skipped modules under their reason, the commonest reason first."""
    reasons: dict[str, list[str]] = {}
    for module, reason in cover.skipped.items():
        reasons.setdefault(reason, []).append(module)
    return sorted(reasons.items(), key=lambda item: -len(item[1]))
