"""The recipe's figures as inline SVG.

Each function returns None where the recipe lacks what the figure shows. Colours are roles of `report.css.j2`
(`var(--kept, …)`), so that one drawing serves light and dark; text stays text, in the page's own font.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import cycle

from markupsafe import Markup

from torchwright.core.records import Recipe, RooflinePoint
from torchwright.report import drawing as d
from torchwright.report import view, wording

NARROW = 400
"""Drawn width in CSS pixels of the waterfall for phones."""
HALF = 420
WIDE = 1040

_FILL = {"original": d.ORIGINAL, "kept": d.KEPT, "slower": d.WARM, "ghost": d.HOLLOW}


@dataclass(frozen=True, kw_only=True)
class _Row:
    """One row of the waterfall: a bar from `start` to `end` seconds, or a cross where none was measured."""

    number: str = ""
    label: str
    start: float = 0.0
    end: float | None
    change: str
    gain: str = ""
    look: str
    """A key of `_FILL`."""


def waterfall(recipe: Recipe, *, width: int = WIDE) -> Markup:
    """From the original's time to the final one: a bar for each step, kept ones solid, others in outline.

    Steps that did not run are left out where they are several. Below 600 pixels of `width` the labels stand above
    the bars instead of next to them.
    """
    rows = _waterfall_rows(recipe)
    unit, scale = wording.time_unit(recipe.baseline.seconds)
    reach = 1.02 * max(max(row.start, row.end or 0.0) for row in rows) / scale or 1.0
    stacked = width < 600
    height, thick = (40.0, 0.25) if stacked else (28.0, 0.5)
    left, right = (4.0, 4.0) if stacked else (350.0, 136.0)
    letters = int(((width if stacked else left) - 30) / d.LETTER)
    plate = d.Plate(width, height * len(rows) + 40, left=left, right=right, top=6, bottom=34)
    plate.axis("x", 0, reach, _tick, f"time of one pass over the workload's calls, {unit}")
    plate.rows(len(rows))
    for index, row in enumerate(rows):
        middle = index + (0.72 if stacked else 0.5)
        line = index + 0.32 if stacked else middle
        if index:
            # The last bar begins at nought but hangs from where the chain of kept steps ended.
            hang = (row.start or row.end or 0.0) / scale
            plate.line([hang, hang], [index - 0.5, middle], d.GHOST, order=1)
        if row.end is None:
            plate.mark(row.start / scale, middle, "x", d.GHOST, extent=5)
        else:
            begin, end = sorted((row.start / scale, row.end / scale))
            edge = d.GHOST if row.look == "ghost" else ""
            plate.bar(middle, begin, max(end, begin + reach / 400), thick, _FILL[row.look], edge=edge)
        colour = d.MUTED if row.look == "ghost" else d.INK
        room = letters - len(row.change) - 9 if stacked else letters
        plate.text(4, line, row.number, d.MUTED)
        plate.text(24, line, wording.elide(row.label, room), colour)
        plate.text(width - 56, line, row.change, colour, align="right")
        plate.text(width - 4, line, row.gain, colour, align="right")
    about = "; ".join(f"{row.label}: {row.change} {row.gain}".rstrip() for row in rows)
    return plate.svg(f"waterfall{width}", "Where the time went", f"{about}.")


def _waterfall_rows(recipe: Recipe) -> list[_Row]:
    base, final = recipe.baseline.seconds, recipe.final.seconds
    rows = [_Row(label="original", end=base, change=wording.seconds(base), look="original")]
    for stage in view.stages(recipe):
        rung, change, look = stage.rung, stage.rung.status, "ghost"
        if rung.kept and stage.end is not None:
            change = ("+" if stage.end > stage.start else "−") + wording.seconds(abs(stage.end - stage.start))
            look = "slower" if stage.end > stage.start else "kept"
        gain = "" if rung.speedup is None else wording.ratio(rung.speedup)
        row = _Row(
            label=str(rung.step), start=stage.start, end=stage.end, change=change, gain=gain, look=look
        )
        rows.append(replace(row, number=str(stage.number)))
    look = "kept" if view.kept(recipe) else "original"
    gain = wording.ratio(recipe.speedup)
    rows.append(_Row(label="final", end=final, change=wording.seconds(final), gain=gain, look=look))
    return rows


def speed_against_loss(recipe: Recipe) -> Markup | None:
    """Every step whose metric was measured, with the budget as a line and the kept path drawn through."""
    base = recipe.baseline.seconds
    measured = [
        (stage, base / stage.end, 100 * stage.rung.quality.drop, 100 * stage.rung.quality.drop_high)
        for stage in view.stages(recipe)
        if stage.end and stage.rung.quality is not None
    ]
    if not measured:
        return None
    budget = 100 * recipe.budget.max_drop
    drops = [0.0, budget, *(drop for _, _, *ends in measured for drop in ends)]
    speeds = [1.0, *(speed for _, speed, _, _ in measured)]
    low, high, slowest, fastest = min(drops), max(drops), min(speeds), max(speeds)
    margin, rise = 0.08 * (high - low or 1.0), 0.1 * (fastest - slowest or 1.0)
    plate = d.Plate(HALF, 310, left=46, right=10, top=12, bottom=40)
    title = "loss of the metric; the whisker ends at its 95% upper bound"
    plate.axis("x", low - margin, high + 2 * margin, lambda value: f"{_tick(value)}%", title, most=6)
    plate.axis(
        "y",
        slowest - rise,
        fastest + rise,
        lambda value: f"{_tick(value)}x",
        "speed against the original",
    )
    plate.limit(budget, high + 2 * margin, d.WARM)
    right_of = budget <= (low + high) / 2
    plate.label(
        budget, slowest - rise, f"budget {budget:g}%", d.WARM, right=5 if right_of else -5, up=6,
        align="left" if right_of else "right",
    )  # fmt: skip
    path = [(0.0, 1.0)] + [(drop, speed) for stage, speed, drop, _ in measured if stage.rung.kept]
    plate.line([x for x, _ in path], [y for _, y in path], d.KEPT, width=1.5)
    plate.mark(0, 1, "o", d.ORIGINAL)
    plate.label(0, 1, "original", d.MUTED, right=8, up=-13)
    up = plate.lifts([(drop, speed) for _, speed, drop, _ in measured], width=26)
    for (stage, speed, drop, most), lift in zip(measured, up, strict=True):
        fill, edge = (d.KEPT, d.KEPT) if stage.rung.kept else (d.PAPER, d.ORIGINAL)
        plate.line([drop, most], [speed, speed], edge)
        plate.mark(drop, speed, "o", fill, edge)
        colour = d.INK if stage.rung.kept else d.MUTED
        plate.label(drop, speed, str(stage.number), colour, right=6, up=4 + lift)
    about = "; ".join(
        f"{stage.number} {stage.rung.step}: {speed:.2f}x at a loss of {drop:.2f}%, {stage.rung.status}"
        for stage, speed, drop, _ in measured
    )
    return plate.svg("loss", "Speed against the loss of the metric", f"Budget {budget:g}%. {about}.")


def memory(recipe: Recipe) -> Markup | None:
    """Peak memory of the original, of every measured step and of the final model, with the weights' share."""
    base, final = recipe.baseline, recipe.final
    rows = [("original", base.peak_memory_bytes, base.weight_bytes, d.ORIGINAL)]
    for number, rung in view.numbered(recipe):
        if rung.memory_bytes is not None:
            rows.append(
                (f"{number} {rung.step.name}", rung.memory_bytes, 0, d.KEPT if rung.kept else d.HOLLOW)
            )
    rows.append(
        ("final", final.peak_memory_bytes, final.weight_bytes, d.KEPT if view.kept(recipe) else d.ORIGINAL)
    )
    most = max(amount for _, amount, _, _ in rows)
    if most <= 0:
        return None
    plate = d.Plate(HALF, 26 * len(rows) + 42, left=126, right=70, top=4, bottom=38)
    plate.axis("x", 0, 1.02 * most, _amount, "peak memory; the solid part is the weights", most=4)
    plate.rows(len(rows))
    for index, (label, amount, weights, fill) in enumerate(rows):
        edge = d.GHOST if fill == d.HOLLOW else ""
        plate.bar(index + 0.5, 0, amount, 0.5, fill, edge=edge, alpha=0.45 if weights else 1.0)
        if weights:
            plate.bar(index + 0.5, 0, min(weights, amount), 0.5, fill)
        colour = d.MUTED if fill == d.HOLLOW else d.INK
        plate.text(118, index + 0.5, wording.elide(label, 16), colour, align="right")
        plate.text(HALF - 2, index + 0.5, wording.size(amount), colour, align="right")
    about = "; ".join(f"{label}: {wording.size(amount)}" for label, amount, _, _ in rows)
    return plate.svg("memory", "Peak memory of every step", f"{about}.")


def roofline(recipe: Recipe) -> Markup | None:
    """Operations per byte against operations per second, under the ceilings measured on this machine."""
    device = recipe.fingerprint.device
    points = [
        point for point in recipe.roofline if point.bytes > 0 and point.operations > 0 and point.seconds > 0
    ]
    ceilings = sorted((rate, name) for name, rate in device.tflops.items() if rate > 0)
    # In TB/s, for then bandwidth times operations per byte are TFLOP/s.
    bandwidth = (device.read_gb_per_s or 0.0) / 1e3
    if not points or not (ceilings or bandwidth > 0):
        return None
    spots = [_spot(point) for point in points]
    corners = [rate / bandwidth for rate, _ in ceilings] if bandwidth > 0 else []
    xs, rates = [x for x, _ in spots] + corners, [y for _, y in spots] + [rate for rate, _ in ceilings]
    left, right = min(xs) / 4, max(xs) * 14
    bottom = min([y for _, y in spots] + ([left * bandwidth] if bandwidth > 0 else [])) / 2.5
    plate = d.Plate(HALF, 330, left=54, right=92, top=12, bottom=42)
    plate.axis("x", left, right, _tick, "operations per byte", log=True)
    plate.axis("y", bottom, 2.2 * max(rates), _tick, "TFLOP/s (int8: TOP/s)", log=True)
    used = {point.dtype for point in points}
    up = plate.lifts([(right, rate) for rate, _ in ceilings], width=26)
    for (rate, name), lift in zip(ceilings, up, strict=True):
        colour, width = (d.INK, 1.5) if name in used else (d.MUTED, 1.0)
        plate.line([rate / bandwidth if bandwidth > 0 else left, right], [rate, rate], colour, width=width)
        name = f"{wording.elide(name, 10)} {wording.three(rate)}"
        plate.label(right, rate, name, colour, right=5, up=lift - 4)
    if bandwidth > 0:
        end = max(corners, default=right)
        middle = (left * end) ** 0.5
        plate.line([left, end], [left * bandwidth, end * bandwidth], d.INK, width=1.5)
        words = f"{wording.three(1e3 * bandwidth)} GB/s"
        plate.label(middle, middle * bandwidth, words, d.INK, right=-8, up=4, align="right")
    _draw_cases(plate, points)
    about = "; ".join(
        f"{point.case} {point.stage}: {point.percent_of_bound:.0f}% of the bound by {point.bound_by}"
        for point in points
    )
    return plate.svg("roofline", "Against what the machine can do at most", f"{about}.")


def _draw_cases(plate: d.Plate, points: list[RooflinePoint]) -> None:
    """Original hollow, final solid, a line between them; one shape per case."""
    cases: dict[str, dict[str, RooflinePoint]] = {}
    for point in points:
        cases.setdefault(point.case, {})[point.stage] = point
    lasts = [ends.get("final") or ends["original"] for ends in cases.values()]
    lifts = plate.lifts([_spot(last) for last in lasts], width=100)
    for shape, (name, ends), last, lift in zip(cycle("osD^vPX"), cases.items(), lasts, lifts, strict=False):
        spots = [_spot(point) for point in ends.values()]
        plate.line([x for x, _ in spots], [y for _, y in spots], d.KEPT, width=1.2, order=4)
        for stage, point in ends.items():
            fill, edge = (d.KEPT, d.KEPT) if stage == "final" else (d.PAPER, d.ORIGINAL)
            plate.mark(*_spot(point), shape, fill, edge)
        words = f"{wording.elide(name, 14)} {last.percent_of_bound:.0f}%"
        plate.label(*_spot(last), words, d.INK, right=8, up=5 + lift)


def cases(recipe: Recipe) -> Markup | None:
    """Each kind of call before and after, as its share of one pass."""
    pairs = view.case_pairs(recipe)
    most = max(
        (max(pair.repeat * pair.before, pair.repeat_after * pair.after) for pair in pairs), default=0.0
    )
    if most <= 0:
        return None
    unit, scale = wording.time_unit(most)
    sentences: list[str] = []
    plate = d.Plate(HALF, 64 * len(pairs) + 42, left=4, right=4, top=4, bottom=38)
    title = f"time in one pass (one call times its calls), {unit}"
    plate.axis("x", 0, 1.02 * most / scale, _tick, title, most=6)
    plate.rows(len(pairs))
    for index, pair in enumerate(pairs):
        plate.bar(index + 0.5, 0, pair.repeat * pair.before / scale, 0.2, d.ORIGINAL)
        plate.bar(index + 0.76, 0, pair.repeat_after * pair.after / scale, 0.2, d.KEPT)
        times = f"{wording.seconds(pair.before)} → {wording.seconds(pair.after)}"
        times = f"{times}, {wording.ratio(pair.speedup)}"
        name = f"{pair.name}, {pair.often} calls" if pair.often else pair.name
        plate.text(4, index + 0.22, wording.elide(name, 28), d.INK)
        plate.text(HALF - 4, index + 0.22, times, d.INK, align="right")
        sentences.append(f"{name}: {times}")
    return plate.svg("cases", "Each kind of call, before and after", "; ".join(sentences) + ".")


def _spot(point: RooflinePoint) -> tuple[float, float]:
    return point.operations / point.bytes, point.tflops


def _tick(value: float) -> str:
    """A tick's number without needless noughts; powers of ten stay readable on a log axis."""
    return f"{value:,.10g}" if abs(value) < 1e5 else f"{value:.0e}"


def _amount(value: float) -> str:
    if value <= 0:
        return "0"
    unit, scale = next(
        ((unit, scale) for unit, scale in (("GB", 1e9), ("MB", 1e6)) if value >= scale), ("kB", 1e3)
    )
    return f"{value / scale:.3g} {unit}"
