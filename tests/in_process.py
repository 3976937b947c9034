"""Trials and packages without processes: the worker's own session, called directly. For tests of what surrounds it."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

import pytest

from torchwright.core.errors import TorchwrightError
from torchwright.core.records import Interval
from torchwright.hardware.devices import devices
from torchwright.hardware.devices.base import Ceilings
from torchwright.hardware.devices.cpu import CPU
from torchwright.optimization.techniques.base import techniques
from torchwright.optimization.trial.client import Context, TrialFailed
from torchwright.optimization.trial.session import TrialSession

TRIED = ("dtype", "compile", "int8_dynamic", "threads")
"""Techniques that are cheap to ask whether they can run."""


class InProcessTrial:
    """Stands where `TrialProcess` does. It takes no thread count or seed from the context: those are the caller's."""

    def __init__(
        self,
        context: Context,
        environment: dict[str, str] | None = None,
        folder: Path | None = None,
        *,
        essential: bool = False,
    ) -> None:
        from torchwright.hardware.devices import get_device
        from torchwright.optimization.trial.travel import unpack

        assert not environment
        self.session = TrialSession()
        self.session.seed = context.seed
        self.session.device = get_device(context.device)
        self.session.workload = unpack(context.workload)
        self.session.workload.device = context.device
        self.session.threads = context.threads

    def ask(self, method: str, **arguments: Any) -> Any:
        import torch

        threads = torch.get_num_threads()
        try:
            with (
                torch.random.fork_rng(),
                warnings.catch_warnings(),
            ):  # in a process of its own they are shown to nobody
                warnings.simplefilter("ignore")
                return getattr(self.session, method)(**arguments)
        except TorchwrightError:
            raise
        except Exception as error:
            raise TrialFailed(f"{type(error).__name__}: {error}") from error
        finally:
            torch.set_num_threads(threads)

    def close(self) -> None:
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None


class InProcessRunner:
    """A runner of packages whose process is this one: it stands where the verifier's `Runner` does."""

    def __init__(
        self, folder: Path, scratch: Path, *, reference: bool = False, artifact: Path | None = None
    ) -> None:
        import torch

        from torchwright.exporter.verification.worker import VerifierSession

        self._session, threads = VerifierSession(), torch.get_num_threads()
        made_from = None if artifact is None else str(artifact)
        try:
            self.load_seconds = self.ask("open", folder=str(folder), reference=reference, artifact=made_from)[
                "seconds"
            ]
        finally:
            torch.set_num_threads(threads)

    def ask(self, what: str, **arguments: Any) -> dict[str, Any]:
        from torchwright.exporter.verification.process import RunFailed

        try:
            return getattr(self._session, what)(**arguments)
        except Exception as error:
            raise RunFailed(f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None


def measured_cpu(ceilings: Ceilings) -> AbstractContextManager[None]:
    """Register a CPU of which these ceilings have been measured."""
    methods = {"ceilings": lambda self, *, refresh=False: ceilings}
    return devices.adding({"cpu": type("Measured", (CPU,), methods)})


def own_cache(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Keep the signing key of artifacts in `folder`; kernels and ceilings stay in the cache that all tests share."""
    monkeypatch.setattr("torchwright.optimization.artifact.folder.cache_folder", lambda: folder)


def trials_in_process(
    monkeypatch: pytest.MonkeyPatch,
    speedup: float | None = None,
    *,
    tried: Collection[str] | None = None,
    cache: Path | None = None,
) -> None:
    """Run trials of the techniques `tried`, or of `TRIED`, here and now, with a `cache` of their own for signatures.

    With `speedup`, every comparison finds just that, whatever the clock says.
    """
    if cache is not None:
        own_cache(monkeypatch, cache)
    for room in (
        "torchwright.optimization.trial.client",
        "torchwright.optimization.proof.forms",
        "torchwright.optimization.api",
    ):
        monkeypatch.setattr(f"{room}.TrialProcess", InProcessTrial)
    monkeypatch.setattr("torchwright.optimization.search.compare.COMPARE_SECONDS", 0.0)
    monkeypatch.setattr("torchwright.optimization.trial.timed.TURN_SECONDS", 0.0)
    monkeypatch.setattr("torchwright.optimization.proof.settle.PROCESSES", 1)
    monkeypatch.setattr(
        "torchwright.optimization.trial.batch_variants.ROWS_COST", float("inf")
    )  # one package, however it was timed
    monkeypatch.setattr("torchwright.hardware.measure.microbench.linear_kernel_seconds", lambda *args: {})
    techniques.names()
    wanted = TRIED if tried is None else tried
    known = {name: target for name, target in techniques._targets.items() if name in wanted}
    monkeypatch.setattr(techniques, "_targets", known)
    if speedup is not None:
        monkeypatch.setattr("torchwright.optimization.trial.session.TrialSession.waited", lambda session: 0.0)
        decree = Interval(value=speedup, low=speedup * 0.99, high=speedup * 1.01)
        monkeypatch.setattr(
            "torchwright.optimization.search.compare.paired_speedup", lambda before, after: decree
        )
        monkeypatch.setattr("torchwright.optimization.api.paired_speedup", lambda before, after: decree)
