"""File descriptors of the HTTP process: some are kept for its own work, clients get the rest."""

from __future__ import annotations

import dataclasses

from torchwright.serve.limits import Limits

WANTED = 65_536
"""The soft limit that is set where the hard one allows it."""
RESERVE = 96
"""Descriptors of the HTTP process itself: the engine's sockets, pipes of workers and jobs, open files."""
TICKS = 4
"""Turns of the loop between the acceptance of a connection that is one too many and its end.

In each, asyncio accepts up to `Limits.accepted_at_once`. Where it finds no descriptor it goes on trying, with a
traceback each time.
"""
LEAST_CONNECTIONS = 16


def raise_limit() -> int:
    """Raise this process's soft limit of open files towards its hard limit; return the soft limit."""
    try:
        import resource
    except ImportError:  # not on Windows, which has no such limit
        return WANTED
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return WANTED if soft == resource.RLIM_INFINITY else soft


def fitting(limits: Limits, files: int) -> Limits:
    """Return the limits with as many connections as `files` descriptors allow, less the reserve."""
    at_once = max(LEAST_CONNECTIONS, min(limits.accepted_at_once, files // (4 * TICKS)))
    room = max(LEAST_CONNECTIONS, files - RESERVE - TICKS * at_once)
    return dataclasses.replace(limits, accepted_at_once=at_once, connections=min(limits.connections, room))
