"""Other people's libraries without what they say of themselves: no user can mend it."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator

TALKATIVE = (
    "transformers",
    "torchao",
    "torch.utils._pytree",
    "diffusers.quantizers.torchao.torchao_quantizer",
)
"""Loggers that warn while their library, or torchao by way of transformers, is imported."""


@contextlib.contextmanager
def quiet_import() -> Iterator[None]:
    """Imports without warnings: kernels of torchao's wheel for another device, names that torch will drop."""
    with errors_alone(*TALKATIVE), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def errors_alone(*names: str) -> Iterator[None]:
    """The loggers of these names say errors within the block, and nothing less."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Converters and quantizers, which log and print what they do, and warn of it."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)
