"""rich's console for text that comes from files: its styles are its own, and controls within the text are escaped."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from torchwright.escapes import escaped


class SafeConsole(Console):
    """A console that a recipe, a config.json or a dump can send no escape sequences through.

    A segment is text or a control code of rich's own; only text is escaped, and styles become codes after that.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(escaped(segment.text), segment.style)
