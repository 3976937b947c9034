"""Waiting for a process without holding up an event loop, and its end in words."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import threading
from collections.abc import Callable


async def exit_code(
    process: subprocess.Popen[bytes], *, thread: str, finish: Callable[[], object] = lambda: None
) -> int:
    """Return the exit code once the process has ended and `finish` has been called, both in a thread of this name.

    asyncio's own processes report an end when the pipes are closed, which whatever they have started may hold open.
    """
    loop = asyncio.get_running_loop()
    code: asyncio.Future[int] = loop.create_future()

    def tell(found: int) -> None:
        if not code.done():
            code.set_result(found)

    def wait() -> None:
        found = process.wait()
        finish()
        with contextlib.suppress(RuntimeError):  # the loop has ended before
            loop.call_soon_threadsafe(tell, found)

    threading.Thread(target=wait, name=thread, daemon=True).start()
    return await code


def how_it_ended(code: int) -> str:
    """Return an exit code of Python's in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal, which has no name of its own
        return f"signal {-code}"
