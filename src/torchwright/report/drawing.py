"""A drawing surface for the figures: sizes in CSS pixels, colours as roles of `report.css.j2`, inline SVG out.

The few shapes that the figures need, written as SVG without a plotting library: the page sets the fonts, and the
package installs 97 MB less.
"""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

from torchwright.report import wording
from torchwright.report.curves import ticks

INK, MUTED, GRID, PAPER = "#1b2430", "#5d6875", "#e3e6ea", "#fffffe"
KEPT, ORIGINAL, GHOST, WARM = "#0f766e", "#8b95a1", "#b4bbc4", "#c2410c"
HOLLOW = "none"
_ROLES = {
    INK: "ink",
    MUTED: "muted",
    GRID: "grid",
    PAPER: "paper",
    KEPT: "kept",
    ORIGINAL: "original",
    GHOST: "ghost",
    WARM: "warm",
}

TEXT, SMALL = 12.0, 11.0
"""Font sizes in CSS pixels."""
LETTER = 7.0
"""Width of a letter of `TEXT`, on the safe side."""
MIDDLE = 0.35
"""Distance, in font sizes, from the middle of a line of text down to its baseline."""
ACROSS, DOWN = 60.0, 40.0
"""Pixels that a tick of the horizontal and of the vertical axis takes, at least."""
MOST_TICKS = 9

Align = Literal["left", "center", "right"]
_ANCHORS: dict[Align, str] = {"left": "start", "center": "middle", "right": "end"}
_POLYGONS: dict[str, Sequence[tuple[float, float]]] = {
    "s": ((-1, -1), (1, -1), (1, 1), (-1, 1)),
    "D": ((0, -1.4), (1.4, 0), (0, 1.4), (-1.4, 0)),
    "^": ((0, -1), (1, 1), (-1, 1)),
    "v": ((0, 1), (1, -1), (-1, -1)),
}
_STROKES: dict[str, Sequence[Sequence[tuple[float, float]]]] = {
    "x": (((-1, -1), (1, 1)), ((-1, 1), (1, -1))),
    "X": (((-1, -1), (1, 1)), ((-1, 1), (1, -1))),
    "P": (((0, -1), (0, 1)), ((-1, 0), (1, 0))),
}
"""Shape of a mark → its outline, or its strokes, in half extents."""


@dataclass(frozen=True)
class _Scale:
    """The range of an axis and the pixels of its two ends."""

    low: float
    high: float
    first: float
    last: float
    log: bool = False

    def pixel(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return self.first + (self.last - self.first) * (value - low) / (high - low)


class Plate:
    """One figure with one pair of axes, `width` by `height` pixels with the given margins. Set the axes first."""

    def __init__(
        self, width: float, height: float, *, left: float, right: float, top: float, bottom: float
    ) -> None:
        self._width, self._height = width, height
        self._left, self._right, self._top, self._bottom = left, width - right, top, height - bottom
        self._x = _Scale(0, 1, self._left, self._right)
        self._y = _Scale(0, 1, self._bottom, self._top)
        self._shapes: list[tuple[float, ET.Element]] = []
        self._stroke(((self._left, self._bottom), (self._right, self._bottom)), GRID, 1, order=0.5)

    def axis(
        self,
        which: Literal["x", "y"],
        low: float,
        high: float,
        words: Callable[[float], str],
        title: str,
        *,
        log: bool = False,
        most: int | None = None,
    ) -> None:
        """Set the range of one axis and label its ticks with `words`, at most `most` of them."""
        if which == "x":
            self._x = _Scale(low, high, self._left, self._right, log)
            length, each = self._right - self._left, ACROSS
            self._words((self._left + self._right) / 2, self._bottom + 31, title, MUTED, SMALL, "center")
        else:
            self._y = _Scale(low, high, self._bottom, self._top, log)
            length, each = self._bottom - self._top, DOWN
            middle = (self._top + self._bottom) / 2
            turned = self._words(SMALL, middle, title, MUTED, SMALL, "center")
            turned.set("transform", f"rotate(-90 {_number(SMALL)} {_number(middle)})")
        most = most or max(2, min(MOST_TICKS, int(length / each)))
        for value in _log_ticks(low, high, most) if log else ticks(low, high, most):
            if which == "x":
                x = self._x.pixel(value)
                self._stroke(((x, self._top), (x, self._bottom)), GRID, 1, order=0)
                self._words(x, self._bottom + 14, words(value), MUTED, SMALL, "center")
            else:
                y = self._y.pixel(value)
                self._stroke(((self._left, y), (self._right, y)), GRID, 1, order=0)
                self._words(self._left - 4, y + MIDDLE * SMALL, words(value), MUTED, SMALL, "right")

    def rows(self, count: int) -> None:
        """Make the vertical axis `count` rows, numbered downwards from 0, without ticks."""
        self._y = _Scale(count, 0, self._bottom, self._top)

    def bar(
        self,
        row: float,
        start: float,
        end: float,
        thick: float,
        fill: str,
        *,
        edge: str = "",
        alpha: float = 1.0,
    ) -> None:
        """Draw a horizontal bar, `thick` in rows."""
        x, y = self._x.pixel(start), self._y.pixel(row - thick / 2)
        shape = self._add("rect", 3, fill, edge or fill, 1)
        shape.attrib |= {"x": _number(x), "y": _number(y)}
        shape.set("width", _number(self._x.pixel(end) - x))
        shape.set("height", _number(self._y.pixel(row + thick / 2) - y))
        if alpha < 1:
            shape.set("opacity", _number(alpha))

    def line(
        self, xs: Sequence[float], ys: Sequence[float], colour: str, *, width: float = 1.0, order: float = 2.0
    ) -> None:
        """Draw a line through points; what has a higher `order` lies above it."""
        points = [(self._x.pixel(x), self._y.pixel(y)) for x, y in zip(xs, ys, strict=True)]
        self._stroke(points, colour, width, order=order)

    def mark(self, x: float, y: float, shape: str, fill: str, edge: str = "", *, extent: float = 7.0) -> None:
        """Draw a mark: `o`, or a shape of `_POLYGONS` or `_STROKES`."""
        x, y, half = self._x.pixel(x), self._y.pixel(y), extent / 2
        edge = edge or fill
        if shape == "o":
            circle = self._add("circle", 5, fill, edge, 1.5)
            circle.attrib |= {"cx": _number(x), "cy": _number(y), "r": _number(half)}
        elif shape in _POLYGONS:
            corners = [(x + half * a, y + half * b) for a, b in _POLYGONS[shape]]
            self._add("path", 5, fill, edge, 1.5).set("d", _path(corners) + "Z")
        else:
            for stroke in _STROKES[shape]:
                self._stroke([(x + half * a, y + half * b) for a, b in stroke], edge, 1.5, order=5)

    def limit(self, x: float, end: float, colour: str) -> None:
        """Draw a line at `x` over the whole height, and a tint from there to `end`."""
        start, stop = self._x.pixel(x), self._x.pixel(end)
        tint = self._add("rect", 1, colour, HOLLOW, 0)
        tint.attrib |= {"x": _number(start), "y": _number(self._top), "opacity": "0.08"}
        tint.attrib |= {"width": _number(stop - start), "height": _number(self._bottom - self._top)}
        self._stroke(((start, self._top), (start, self._bottom)), colour, 1.5, order=2)

    def text(self, pixel: float, row: float, words: str, colour: str, *, align: Align = "left") -> None:
        """Write words at `pixel` from the figure's left edge, in the middle of `row`."""
        self._words(pixel, self._y.pixel(row) + MIDDLE * TEXT, words, colour, TEXT, align)

    def label(
        self, x: float, y: float, words: str, colour: str, *, right: float, up: float, align: Align = "left"
    ) -> None:
        """Write small words `right` and `up` pixels from a point."""
        self._words(self._x.pixel(x) + right, self._y.pixel(y) - up, words, colour, SMALL, align, order=6)

    def lifts(self, places: Sequence[tuple[float, float]], *, width: float) -> list[float]:
        """Return how far up each label of `width` pixels must move so that no two overlap."""
        spots = [(self._x.pixel(x), self._height - self._y.pixel(y)) for x, y in places]
        result, taken = [0.0] * len(spots), list[tuple[float, float]]()
        for index in sorted(range(len(spots)), key=lambda index: spots[index][1]):
            x, y = spots[index]
            for other, height in sorted(taken, key=lambda spot: spot[1]):
                if abs(other - x) < width and abs(height - y) < TEXT:
                    y = height + TEXT
            taken.append((x, y))
            result[index] = y - spots[index][1]
        return result

    def svg(self, key: str, title: str, about: str) -> Markup:
        """Return the figure as an inline SVG element with a title and a description.

        `key` is unique in the page: it keeps this figure's ids apart from the others'.
        """
        # Inline SVG needs no namespace, and the page then holds no address at all.
        root = ET.Element("svg", {"viewBox": f"0 0 {_number(self._width)} {_number(self._height)}"})
        root.attrib |= {"role": "img", "aria-labelledby": f"{key}-title {key}-about"}
        root.set("style", f"max-width: {1.15 * self._width:.0f}px")
        for tag, name, text in (("title", "title", title), ("desc", "about", about)):
            ET.SubElement(root, tag, {"id": f"{key}-{name}"}).text = wording.clean(text)
        root.extend(shape for _, shape in sorted(self._shapes, key=lambda shape: shape[0]))
        return Markup(ET.tostring(root, encoding="unicode"))

    def _words(
        self, x: float, y: float, words: str, colour: str, extent: float, align: Align, *, order: float = 4
    ) -> ET.Element:
        shape = ET.Element("text", {"x": _number(x), "y": _number(y), "text-anchor": _ANCHORS[align]})
        shape.set("style", f"fill: {_role(colour)}; font-size: {_number(extent)}px")
        shape.text = wording.clean(words)
        self._shapes.append((order, shape))
        return shape

    def _stroke(
        self, points: Sequence[tuple[float, float]], colour: str, width: float, *, order: float
    ) -> None:
        self._add("path", order, HOLLOW, colour, width).set("d", _path(points))

    def _add(self, tag: str, order: float, fill: str, edge: str, width: float) -> ET.Element:
        style = f"fill: {_role(fill)}; stroke: {_role(edge)}; stroke-width: {_number(width)}"
        shape = ET.Element(tag, {"style": style})
        self._shapes.append((order, shape))
        return shape


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    """Return 1, 2 and 5 times the powers of ten within a range, or fewer of the powers: at most `most`."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    every = 0
    while len(found := [value for value in found if low <= value <= high]) > most:
        every += 1
        found = [10.0**power for power in powers if power % every == 0]
    return found


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{_number(x)} {_number(y)}" for x, y in points)


def _number(value: float) -> str:
    return f"{round(value, 2):.10g}"


def _role(colour: str) -> str:
    role = _ROLES.get(colour)
    return f"var(--{role}, {colour})" if role else colour
