"""Notices for prompts that are longer than a text encoder reads.

diffusers writes the whole rest of such a prompt to its log, also on a server, and does not notify the caller.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torchwright.core.quiet import errors_alone

CUT = re.compile(r"input was truncated\b.*?\b(\d+) tokens: ", re.DOTALL)
COUNTERS = "transformers.tokenization_utils_base"
"""The logger that counts tokens of the same prompts, and calls what is cut off later an error."""


@contextmanager
def cut_prompts(pipe: Any) -> Iterator[list[str]]:
    """Collects, in a sentence each, what a pipeline of diffusers left out of prompts within the block."""
    found, thread = list[str](), threading.get_ident()

    def other(record: logging.LogRecord) -> bool:
        cut = CUT.search(record.getMessage()) if record.thread == thread else None
        if cut is None:
            return True
        said = f"a text encoder reads {cut[1]} tokens: the end of the prompt was left out"
        if said not in found:
            found.append(said)
        return False

    logger = logging.getLogger(type(pipe).__module__)
    logger.addFilter(other)
    try:
        with errors_alone(COUNTERS):
            yield found
    finally:
        logger.removeFilter(other)
