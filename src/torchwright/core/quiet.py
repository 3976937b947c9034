"""Other people's libraries without what they say of themselves: no user can mend it."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

from torchwright.core import system

TALKATIVE = (
    "transformers",
    "torchao",
    "torch.utils._pytree",
    "diffusers.quantizers.torchao.torchao_quantizer",
)
"""Loggers that warn while their library, or torchao by way of transformers, is imported."""
REPORTS = {"CI": "true", "NNCF_CI": "1"}
"""Environment variables that keep libraries from reporting to their makers."""


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
    """Third-party converters and quantizers, which log, print and warn."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def unreported() -> Iterator[None]:
    """OpenVINO and NNCF, which send what they were given to do to their makers unless they take a machine for CI's.

    Nobody has asked for that here; and the threads that do it took 10 of the 26 s of a conversion on one core.
    """
    with system.environment(REPORTS):
        yield


def import_openvino() -> Any:
    """OpenVINO, of which importing it is reported, too."""
    with unreported():
        import openvino  # pyright: ignore[reportMissingImports]

    return openvino


def openvino_core() -> Any:
    """Return this process's one `openvino.Core`, which stays until the process ends.

    Each Core has its own stack for signal handlers and restores the previous Core's on release, which may be gone by
    then: after two artifacts were loaded and released the next Ctrl-C ended the process with a core dump (OpenVINO
    2026.4, src/plugins/intel_cpu/src/plugin.cpp).
    """
    return _core_of(os.getpid())


@functools.cache
def _core_of(process: int) -> Any:
    """A fork has none of the threads of its parent's."""
    return import_openvino().Core()
