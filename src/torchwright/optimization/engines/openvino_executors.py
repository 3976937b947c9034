# pyright: basic, reportMissingImports=false
"""OpenVINO's executors around a fork.

OpenVINO keeps the threads of a released model for the next model with as many of them. A child of a fork has these
executors and not their threads, so that the next model would wait for them for ever. They are in use at a fork
therefore, by models of one operator, and the child never gives those back.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections import Counter
from typing import Any

import numpy as np

from torchwright.core.process.forks import never_freed
from torchwright.core.quiet import import_openvino, openvino_core

SHARED = ("INFERENCE_NUM_THREADS", "PERFORMANCE_HINT")
"""Settings of models that can take over each other's executor."""

_lock = threading.Lock()
_alive: Counter[frozenset[tuple[str, Any]]] = Counter()
"""Models in use, by these settings."""
_executors: Counter[frozenset[tuple[str, Any]]] = Counter()
"""The most models that were in use at once: as many executors there are."""
_held: list[Any] = []


def compile_for(owner: object, model: Any, settings: dict[str, Any]) -> Any:
    """Compile a model for this processor; its executor counts as used until `owner` is gone."""
    _guard_forks()
    key = frozenset((name, settings[name]) for name in SHARED if name in settings)
    compiled = openvino_core().compile_model(model, "CPU", settings)
    with _lock:
        _alive[key] += 1
        _executors[key] = max(_executors[key], _alive[key])
    weakref.finalize(owner, _release, key).atexit = False
    return compiled


@functools.cache
def _guard_forks() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_occupy, after_in_parent=_held.clear, after_in_child=_begin_anew)


def _release(key: frozenset[tuple[str, Any]]) -> None:
    with _lock:
        _alive[key] -= 1


def _occupy() -> None:
    """Take all executors that no model uses."""
    for key, count in (_executors - _alive).items():
        _held.extend(openvino_core().compile_model(_smallest(), "CPU", dict(key)) for _ in range(count))


def _begin_anew() -> None:
    never_freed(list(_held))
    for counts in (_held, _alive, _executors):
        counts.clear()


def _smallest() -> Any:
    ov = import_openvino()
    from openvino import opset13 as operators

    given = operators.parameter([1], np.float32)
    return ov.Model([operators.relu(given)], [given])
