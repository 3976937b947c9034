"""The engine contract: what runs a prepared model, keeps what an artifact needs for that, and loads it again.

    engine = engines.get("jit").prepare(target)
    engine(case)

A package of its own adds one by an entry point of the group `torchwright.engines`; a technique names it in
`Settings.engine`. Importing this imports no torch, and none of the engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self

from torchwright.core.errors import TorchwrightError
from torchwright.core.registry import Registry
from torchwright.optimization.engines.dispatch.spec import CallSpec, NumberDomain

if TYPE_CHECKING:
    from torchwright.optimization.engines.dispatch.call_dispatcher import CallDispatcher, CompiledCall
    from torchwright.optimization.techniques.base import Target
    from torchwright.workloads.base import Case, Run

engines: Registry[type[Engine]] = Registry(
    "engine",
    group="torchwright.engines",
    builtins={
        "eager": "torchwright.optimization.engines.eager:Eager",
        "jit": "torchwright.optimization.engines.jit:Jit",
        "aot": "torchwright.optimization.engines.aot:Aot",
        "native": "torchwright.optimization.engines.native:NativeEngine",
        "native_speech": "torchwright.optimization.engines.native_speech:NativeSpeechEngine",
        "native_seq2seq": "torchwright.optimization.engines.native_seq2seq:NativeSeq2SeqEngine",
        "native_vision": "torchwright.optimization.engines.native_vision:NativeVisionEngine",
        "openvino": "torchwright.optimization.engines.openvino:OpenVino",
        "onnxruntime": "torchwright.optimization.engines.onnxruntime:OnnxRuntime",
    },
    next="install the package that brings it",
)

ShippingForm = Literal["native", "package", "graphs", "rebuild", "module"]
"""The contents of an artifact: the engine's own files; compiled packages with their graphs; graphs alone; the folder
from which the model is rebuilt; or none of these, for the recipe on the caller's own module."""
NATIVE, MODEL = "native", "model"
"""Folders of an artifact: compiled code for one machine; configuration, tokenizer and weights."""
SAME_MACHINE_ERROR = 1e-2
OTHER_MACHINE_ERROR = 0.1
"""Largest relative error of the self-test's output: the same code rounds alike, other code and other ISAs do not."""


@dataclass(kw_only=True)
class Ready:
    """One way to run an artifact."""

    how: str
    """See `Loaded.how`."""
    run: Run
    dispatcher: Any = None
    """The `CallDispatcher` that takes calls as a user makes them, if there is one."""
    answers: Any = None
    """The user's interface, where it is built from neither of these."""
    tolerance: float = OTHER_MACHINE_ERROR


class Kept(Protocol):
    """An artifact, as the engine sees it that loads it. Its files are whole."""

    path: Path
    device: str
    threads: int | None
    calls: tuple[CallSpec, ...]
    """The engine's prepared files, as the manifest lists them."""
    refusal: str | None
    """Why its compiled code is not loaded: it is of another machine, or of somebody who is not trusted."""

    trusted: bool
    """True if this user built it here, or has said that it may be trusted."""

    def say(self, notice: str) -> None:
        """Tell the user."""
        ...

    def packages(self, how: str) -> Ready:
        """Its compiled code, said to run as `how`. Only where there is no `refusal`."""
        ...

    def dispatcher(self, calls: Sequence[CompiledCall]) -> CallDispatcher:
        """Return the dispatcher of a user's calls, which turns them into those of `calls`."""
        ...

    def graphs(self, *, compiled: bool) -> Ready | None:
        """Its portable graphs, compiled here or run operator by operator; None where it has none."""
        ...


class Engine:
    """A prepared model, called case by case. Made by `prepare`, in the process that runs it."""

    name: ClassVar[str]
    how: ClassVar[str]
    """The reported name of the running code (`Loaded.how`)."""
    compiles: ClassVar[bool] = True
    """True if `prepare` takes time, so that a break-even exists."""
    apart: ClassVar[bool] = False
    """True if `prepare` writes files, which `opened` runs in a process that has seen neither model nor compiler."""
    whole: ClassVar[bool] = False
    """True if its artifact is plain data of a whole model: it is read while its checksums are compared, takes calls
    of any size, and needs no module of the caller's."""
    domain: ClassVar[NumberDomain] = NumberDomain()
    """The numbers that it computes as PyTorch does; calls outside of them are answered by the fallback."""
    cache: ClassVar[tuple[str, ...]] = ()
    """Files of compiled code that `keep` may leave in NATIVE, for `restore`."""
    calls: tuple[CallSpec, ...] = ()
    """Return the files of an engine that is `apart`."""

    @classmethod
    def unavailable(cls) -> str | None:
        """Why it cannot run here and what would mend that, or None. Imports nothing that it would need."""
        return None

    @classmethod
    def available(cls, what: str, kind: type[TorchwrightError]) -> type[Self]:
        """Itself; raises a `kind` of error, about `what` was asked for, where it cannot run here."""
        if reason := cls.unavailable():
            raise kind(f"{what} needs the engine '{cls.name}', which cannot run here", found=reason)
        return cls

    # ------------------------------------------------------------------------------------------- prepare, run

    @classmethod
    def prepare(cls, target: Target, folder: Path | None = None) -> Self:
        """Compile or convert a model to which all steps were applied.

        What is `apart` is written into `folder`; another engine is given none. Raises `RefusedTechnique` where it
        cannot take the model.
        """
        raise NotImplementedError

    @classmethod
    def opened(cls, folder: Path, calls: tuple[CallSpec, ...], device: str) -> Self:
        """Open the files that `prepare` of an engine that is `apart` has written in another process."""
        raise NotImplementedError

    def __call__(self, case: Case) -> Any:
        """Run one call."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise `RefusedTechnique` where the first calls have shown that it does not run the model after all."""

    def recompiles(self) -> int:
        """Return how often calls caused a recompilation. Raises a `TorchwrightError` if recompilation has no end."""
        return 0

    def others(self) -> Self | None:
        """Return what answers calls of other sizes than the examples', built to answer the examples', too; None if
        the examples' own code answers all sizes."""
        return None

    def widen_others(self) -> bool:
        """Have less of what answers calls of other sizes be rounded; False where nothing more can be."""
        return False

    # --------------------------------------------------------------------------------------------------- keep

    @classmethod
    def ways(cls, own: ShippingForm) -> dict[ShippingForm, str]:
        """Return the shipping forms of its recipes, those that need least of the caller first, each with the engine
        that runs it. `own` is how the model is rebuilt: `rebuild` or `module`."""
        return {own: cls.name}

    def keep(self, folder: Path) -> str | None:
        """Write what an artifact in `folder` needs of this; what the recipe should note is returned."""
        return None

    # --------------------------------------------------------------------------------------------------- load

    @classmethod
    def load(cls, kept: Kept) -> Ready | None:
        """Return the form that an artifact itself can run; None if its model must be rebuilt and prepared again.

        What of its files is code may be run only where there is no `kept.refusal`.
        """
        return None

    @classmethod
    def load_fallback(cls, kept: Kept) -> Ready | None:
        """Load what the artifact carries to answer where the engine is `unavailable`; None where that is nothing."""
        return None

    @classmethod
    def stand_in(cls) -> type[Engine]:
        """Return the engine that runs its recipe on a rebuilt model, whose calls' sizes are unknown; without a
        folder.
        """
        return cls

    @classmethod
    def restore(cls, folder: Path) -> None:
        """Let `prepare` find what `keep` has left in `folder`, an artifact's NATIVE; `cache` says what may be there."""
