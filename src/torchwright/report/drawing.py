"""A drawing surface for the figures: sizes in CSS pixels, colours as roles of `report.css.j2`, inline SVG out.

The few shapes that the figures need, over matplotlib's object interface: nothing of pyplot, and no setting
that outlives a `drawing()` block.
"""

from __future__ import annotations

import io
import re
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import matplotlib
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.transforms import IdentityTransform, blended_transform_factory

from torchwright.report import wording

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

Align = Literal["left", "center", "right"]


@contextmanager
def drawing(
    width: float, height: float, *, left: float, right: float, top: float, bottom: float
) -> Generator[Plate]:
    """A plate of `width` by `height` pixels with the given margins around its axes."""
    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "torchwright",
        "text.parse_math": False,  # a dollar in a name is a dollar
        "font.family": ["DejaVu Sans"],  # measures text; the page sets it in its own font, which is narrower
        "font.size": TEXT,
        "axes.edgecolor": GRID,
        "axes.axisbelow": True,
    }
    library: Any = matplotlib
    with library.rc_context(settings), warnings.catch_warnings():
        # A name may hold characters that the measuring font lacks; the reader's browser will have them.
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        yield Plate(width, height, left=left, right=right, top=top, bottom=bottom)


class Plate:
    """One figure with one pair of axes. Made by `drawing()`; set the axes before anything is drawn."""

    def __init__(
        self, width: float, height: float, *, left: float, right: float, top: float, bottom: float
    ) -> None:
        # At 72 dots per inch an inch's fraction, a dot and a CSS pixel of the view box are one scale.
        self._figure: Any = Figure(figsize=(width / 72, height / 72), dpi=72)
        inner = (
            left / width,
            bottom / height,
            (width - left - right) / width,
            (height - top - bottom) / height,
        )
        self._axes: Any = self._figure.add_axes(inner)
        self._axes.patch.set_visible(False)
        for side in ("top", "right", "left"):
            self._axes.spines[side].set_visible(False)

    def axis(
        self,
        which: Literal["x", "y"],
        low: float,
        high: float,
        words: Callable[[float], str],
        title: str,
        *,
        log: bool = False,
        ticks: int | None = None,
    ) -> None:
        """Sets the range of one axis and labels its ticks with `words`."""
        if log:
            getattr(self._axes, f"set_{which}scale")("log")
        getattr(self._axes, f"set_{which}lim")(low, high)
        axis = getattr(self._axes, f"{which}axis")
        axis.set_major_formatter(_formatter(words))
        axis.set_minor_formatter(_formatter(lambda _: ""))
        axis.set_tick_params(which="both", length=0, labelsize=SMALL, labelcolor=MUTED)
        axis.set_label_text(title, color=MUTED, fontsize=SMALL)
        axis.grid(visible=True, color=GRID, linewidth=1)
        if ticks is not None:
            self._axes.locator_params(axis=which, nbins=ticks)

    def rows(self, count: int) -> None:
        """Makes the vertical axis `count` rows, numbered downwards from 0, without ticks."""
        self._axes.set_ylim(count, 0)
        self._axes.set_yticks([])

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
        """A horizontal bar, `thick` in rows."""
        self._axes.barh(
            row,
            end - start,
            thick,
            start,
            color=fill,
            edgecolor=edge or fill,
            linewidth=1,
            alpha=alpha,
            zorder=3,
        )

    def line(
        self, xs: Sequence[float], ys: Sequence[float], colour: str, *, width: float = 1.0, order: float = 2.0
    ) -> None:
        self._axes.plot(xs, ys, color=colour, linewidth=width, zorder=order)

    def mark(self, x: float, y: float, shape: str, fill: str, edge: str = "", *, extent: float = 7.0) -> None:
        self._axes.plot(
            [x],
            [y],
            shape,
            color=fill,
            markeredgecolor=edge or fill,
            markeredgewidth=1.5,
            markersize=extent,
            zorder=5,
        )

    def limit(self, x: float, end: float, colour: str) -> None:
        """A line at `x` over the whole height, and a tint from there to `end`."""
        self._axes.axvspan(x, end, color=colour, alpha=0.08, linewidth=0)
        self._axes.axvline(x, color=colour, linewidth=1.5)

    def text(self, pixel: float, row: float, words: str, colour: str, *, align: Align = "left") -> None:
        """Words at `pixel` from the figure's left edge, in the middle of `row`."""
        place = blended_transform_factory(IdentityTransform(), self._axes.transData)
        self._axes.text(pixel, row, words, color=colour, va="center", ha=align, transform=place)

    def label(
        self, x: float, y: float, words: str, colour: str, *, right: float, up: float, align: Align = "left"
    ) -> None:
        """Small words `right` and `up` pixels from a point."""
        offset = {"xytext": (right, up), "textcoords": "offset points"}
        self._axes.annotate(words, (x, y), ha=align, color=colour, fontsize=SMALL, zorder=6, **offset)

    def lifts(self, places: Sequence[tuple[float, float]], *, width: float) -> list[float]:
        """Return how far up each label of `width` pixels must move so that no two overlap."""
        spots: list[tuple[float, float]] = [tuple(self._axes.transData.transform(place)) for place in places]
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
        """The figure as an inline SVG element with a title and a description.

        `key` is unique in the page: it keeps this figure's ids apart from the others'.
        """
        file = io.StringIO()
        self._figure.savefig(file, format="svg", transparent=True)
        return _inline(ET.fromstring(file.getvalue()), key, title, about)


def _formatter(words: Callable[[float], str]) -> Callable[[float, int], str]:
    def formatter(value: float, _: int) -> str:
        return words(value)

    return formatter


def _inline(root: ET.Element, key: str, title: str, about: str) -> Markup:
    # The metadata names addresses, and a style sheet inside inline SVG would reach the whole page.
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.rpartition("}")[2] in ("metadata", "style"):
                parent.remove(child)
    values = " ".join(value for node in root.iter() for value in node.attrib.values())
    used = set(re.findall(r"#([\w-]+)", values))
    for node in root.iter():
        # Inline SVG needs no namespaces, and the page then holds no address at all.
        node.tag = node.tag.rpartition("}")[2]
        attributes = {name.rpartition("}")[2]: value for name, value in node.attrib.items()}
        if attributes.get("id") not in used:
            attributes.pop("id", None)
        node.attrib.clear()
        node.attrib.update({name: _themed(name, value, key) for name, value in attributes.items()})
    for name in ("version", "width", "height"):
        root.attrib.pop(name, None)
    width = float(root.attrib["viewBox"].split()[2])
    root.attrib["role"] = "img"
    root.attrib["aria-labelledby"] = f"{key}-title {key}-about"
    root.attrib["style"] = f"max-width: {1.15 * width:.0f}px"
    for index, (tag, name, text) in enumerate((("title", "title", title), ("desc", "about", about))):
        node = ET.Element(tag, {"id": f"{key}-{name}"})
        node.text = wording.clean(text)
        root.insert(index, node)
    return Markup(ET.tostring(root, encoding="unicode"))


def _themed(name: str, value: str, key: str) -> str:
    """One attribute with its ids made unique, colours as roles, and no font of its own."""
    if name == "id":
        return f"{key}-{value}"
    if name == "href" or "url(#" in value:
        return value.replace("#", f"#{key}-")
    if name != "style":
        return value
    value = re.sub(r"font-family: [^;]+;?", "", value)
    return re.sub(r"#[0-9a-f]{6}", lambda match: _role(match.group()), value)


def _role(colour: str) -> str:
    role = _ROLES.get(colour)
    return f"var(--{role}, {colour})" if role else colour
