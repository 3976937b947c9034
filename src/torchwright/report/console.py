"""rich's console for text that comes from files: its styles are its own, and controls within the text are escaped."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from torchwright.core.ansi import no_color, takes_movement
from torchwright.core.escapes import escaped


class SafeConsole(Console):
    """A console that a recipe, a config.json or a dump can send no escape sequences through.

    A segment is text or a control code of rich's own; only text is escaped, and styles become codes after that.
    NO_COLOR turns off every style; rich by itself keeps bold and dim.
    """

    def __init__(self, **options: Any) -> None:
        """Take the options of rich's console."""
        if no_color():
            options.setdefault("color_system", None)
        super().__init__(**options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(escaped(segment.text), segment.style)


def moves(console: Console) -> bool:
    """Check whether a console can write lines again. FORCE_COLOR makes rich call a pipe a terminal, but not this."""
    return console.is_interactive and takes_movement(console.file)
