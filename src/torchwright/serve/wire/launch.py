"""Starting the engine's process. It takes longest to be ready, so it is started before the HTTP side's own packages
are imported: nothing but the standard library here.
"""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchwright.core import system
from torchwright.core.process import folders
from torchwright.core.process.waited import exit_code


@dataclass(frozen=True)
class Launched:
    """An engine's process, and the socket that it connects to."""

    endpoint: str
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """End it, and what it has started."""
        if self.process.returncode is None:
            system.kill_all(self.process)

    async def ended(self) -> int:
        """Return its exit code, once it has ended."""
        return await exit_code(self.process, thread="wait-engine")


class Launcher:
    """Starts engines by the command that `argv` makes of a socket's address. `close` it at the end."""

    def __init__(self, argv: Callable[[str], Sequence[str]]) -> None:
        self._argv = argv
        self._folder = folders.make_for_sockets("engine-99999999")  # of mode 0700
        self._starts = itertools.count()
        self._ahead: Launched | None = None

    def start_ahead(self) -> None:
        """Start the engine that the next `launch` returns."""
        self._ahead = self.launch()

    def launch(self) -> Launched:
        """A new engine."""
        if self._ahead is not None:
            launched, self._ahead = self._ahead, None
            return launched
        endpoint = f"ipc://{self._folder.path / f'engine-{next(self._starts)}'}"
        # In a session of its own, because Ctrl-C is for the server, which then drains.
        process: subprocess.Popen[bytes] = subprocess.Popen(self._argv(endpoint), **system.apart())
        return Launched(endpoint, process)

    def close(self) -> None:
        """Remove the sockets' folder, and end an engine that was started ahead and not taken."""
        if self._ahead is not None:
            self._ahead.kill()
            self._ahead.process.wait()
        self._folder.remove()
