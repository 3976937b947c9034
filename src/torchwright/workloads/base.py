"""The workload contract: builds the model afresh, yields representative calls, knows its metric, and says what the
user of an artifact calls.

A workload travels to the trial processes by cloudpickle and is never read from a file. What a file keeps is
`describe()`: plain data from which the same workload is built again.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import traceback
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from torch import nn
from torch.nn.utils import parametrize

from torchwright.core import nested
from torchwright.core.errors import ArtifactError, ModelError, TorchwrightError, WorkloadError, first_line
from torchwright.core.records import Quality
from torchwright.core.registry import Registry
from torchwright.report.pictures import PictureRow

Run = Callable[["Case"], Any]
"""Makes one call of the model, however it is executed, and returns its output."""

Served = Literal["", "writer", "reader", "recognizer", "painter", "translator"]
"""A writer continues texts (`generation.Writer`), a reader answers for whole ones (`encoding.TextAnswerer`), a
recognizer writes down sound (`speech.base.Recognizer`); others are not served."""
CALIBRATION_BATCHES = 4
FURTHER = 4
"""The largest sample for a verdict that the first left open, in its own size: the interval is half as wide."""
"""The number of calibration batches, if the workload has more data than it judges by."""
LARGEST_SIZE = 2**24
"""Rows or tokens of a workload that a file describes."""

workloads: Registry[type[Workload]] = Registry(
    "workload",
    group="torchwright.workloads",
    builtins={
        "module": "torchwright.workloads.module:ModuleWorkload",
        "language": "torchwright.workloads.language:LanguageWorkload",
        "encoder": "torchwright.workloads.encoder:EncoderWorkload",
        "image": "torchwright.workloads.image:ImageWorkload",
        "diffusion": "torchwright.models.diffusion.workload:DiffusionWorkload",
        "speech": "torchwright.models.speech.workload:SpeechWorkload",
        "seq2seq": "torchwright.models.decoder.seq2seq.workload:Seq2SeqWorkload",
        "vision_language": "torchwright.models.vision.workload:VisionLanguageWorkload",
        "segment": "torchwright.models.segment.workload:SegmentWorkload",
        "semantic": "torchwright.models.segment.semantic_workload:SemanticWorkload",
        "forward": "torchwright.workloads.forward:ForwardWorkload",
    },
)


@contextlib.contextmanager
def blaming(cls: type[Workload], method: str) -> Iterator[None]:
    """Raises `WorkloadError`, which names class and line, for what a method of another package's workload raises.

    What it says in words itself, and what a built-in one raises, passes.
    """
    try:
        yield
    except (TorchwrightError, MemoryError):
        raise
    except Exception as error:
        if cls.__module__.partition(".")[0] == "torchwright":
            raise
        file = getattr(sys.modules.get(cls.__module__), "__file__", None)
        lines = [
            frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file
        ]
        where = f" ({file}, line {lines[-1]})" if lines else ""
        raise WorkloadError(
            f"the workload '{cls.name}' failed in {cls.__qualname__}.{method}",
            found=f"{type(error).__name__}: {first_line(error)}{where}",
        ) from error


def class_of(description: dict[str, Any]) -> type[Workload]:
    """The class that gave a description; raises `ArtifactError` where nobody here has registered its kind."""
    kind = description.get("kind")
    if kind not in workloads.names():
        raise ArtifactError(
            f"the recipe's workload is of kind {repr(kind)[:80]}",
            allowed=", ".join(workloads.names()),
            next="install the package that has it, or update torchwright",
        )
    return workloads.get(kind)


@dataclass(frozen=True)
class Case:
    """One kind of call: a name, its inputs, and how often the workload makes it."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    repeat: int = 1
    dynamic: Any = None
    """`torch.export` dynamic shapes for these arguments; None exports the shapes as they are."""
    fixed: bool = False
    """The call is known by its name; others are known by the shapes of their inputs."""
    part: str = ""
    """The component that it calls, of a workload that has several."""
    example: tuple[Any, ...] | None = None
    """Arguments to export with where they differ from those that are timed."""


@dataclass(frozen=True, kw_only=True)
class Optimized:
    """A workload's model as an artifact runs it: what `Workload.answerer` answers with."""

    run: Run
    """Makes any of the workload's `cases`, without gradients; tensors come from anywhere and go back there."""
    description: dict[str, Any]
    """The description from `describe`, checked by `check`."""
    dtype: torch.dtype
    """The dtype of floating-point state, as passed to `cases`."""
    device: str
    """The device that holds the model."""
    folder: Path
    """The artifact's own copy of `files`; it may not be there."""


class Workload(ABC):
    """A model with its representative calls, its metric, and the object that its user finally calls.

    A new kind needs one class in a package of its own and one entry point of the group `torchwright.workloads` under
    the class's `name`. Search, artifact, `load`, `bench` and `verify` ask the class for everything else.

    `torchwright optimize FOLDER` constructs it as `Class(folder, **options)`. The options are the constructor's other
    parameters, by name. The result of `describe` is the recipe's `workload`, from which the workload is rebuilt in
    another process or on another machine:

    - `kind`: the class's `name`.
    - `model`: the user's name for the model, which `label` holds.
    - Each option by its name, with its value. A missing option or None takes its default.
    - Whatever else `check`, `front`, `answerer` and `rates` need. They see only the description.
    - `batch`, `prompt_tokens` and `new_tokens`, where present, are the units in which the report counts rows and
      tokens.

    All values are plain data that JSON keeps: dicts, lists, strings, numbers, booleans and None.
    """

    name: ClassVar[str]
    """Under which it is registered; in the class, because a description is all that a loaded artifact has."""
    supports: ClassVar[str] = ""
    """The architectures of Hugging Face folders that it takes, in words; empty where it takes none."""
    leftovers: ClassVar[bool] = False
    """True if detection asks this kind last, because it also accepts what the others could take."""
    from_code: ClassVar[bool] = False
    """True if the model comes from the user's code instead of a folder, so that a file cannot keep it."""
    opens: ClassVar[frozenset[str]] = frozenset()
    """Options that name files outside the model's folder, used to judge the model. They are not opened for an
    untrusted artifact."""
    has_model: ClassVar[bool] = True
    """True if `build` returns the user's own model instead of a stand-in."""
    label: str = ""
    """The user's name for the model."""
    device: str = "cpu"
    """The device of the calls' tensors; a process that runs the model elsewhere sets it."""
    sample: Sequence[int] = ()
    """The batches that the metric sees where they are not the first ones."""

    @classmethod
    def accepts(cls, folder: Path, config: dict[str, Any]) -> bool:
        """Check whether a Hugging Face folder with this config.json holds this kind of model."""
        return False

    @classmethod
    def example(cls, folder: Path) -> Self | None:
        """A small one with random weights, its files in `folder`, for the contract tests of `torchwright.testing`."""
        return None

    @abstractmethod
    def build(self) -> nn.Module:
        """The original, in eval mode, fresh: changing it changes nobody's model.

        Raises `ModelError` when it cannot be built.
        """

    def adapt(self, model: nn.Module) -> nn.Module:
        """Return the module that techniques transform: the model itself, or an equivalent wrapper with fixed shapes."""
        return model

    @abstractmethod
    def cases(self, dtype: torch.dtype) -> list[Case]:
        """The calls of the adapted model, with floating-point state (such as a KV cache) in `dtype`."""

    def graphs(self, dtype: torch.dtype) -> list[Case]:
        """The calls that are really made of the adapted model, and so exported; `front` answers `cases` by them."""
        return self.cases(dtype)

    @classmethod
    def front(cls, run: Run, description: dict[str, Any]) -> Run:
        """Answers any of `cases` by calls that have the shapes of `graphs`, for the workload described."""
        return run

    @classmethod  # noqa: B027
    def check(cls, description: dict[str, Any]) -> None:
        """Raise `ArtifactError` for a description that `front`, `answerer` or `rates` cannot use.

        The description may be untrusted, so any field can hold anything.
        """

    @classmethod
    def answerer(cls, optimized: Optimized) -> Any:
        """Return the object that an artifact's user calls: `tw.load(DIR).model`.

        None where that is the model itself, called as the original is.
        """
        return None

    @classmethod
    def served_as(cls, description: dict[str, Any]) -> Served:
        """Return how `torchwright serve` serves an artifact of this workload."""
        return ""

    @classmethod
    def rates(cls, description: dict[str, Any], seconds: dict[str, float]) -> dict[str, float]:
        """Return the rates, such as tokens per second, that reports and `bench` print next to each call's `seconds`."""
        return {}

    def bucketed(self, count: int, multiple: int) -> Workload | None:
        """The same rows in at most `count` calls of about equal lengths, or None where that means nothing."""
        return None

    def called_as_is(self) -> bool:
        """Check whether the user calls the model itself, in whatever form the original takes."""
        return False

    def original_run(self, model: nn.Module) -> Run:
        """Run the original as its user does; the baseline is timed through this call."""
        return lambda case: model(*case.args, **case.kwargs)

    def cast(self, model: nn.Module, dtype: torch.dtype, keep: Callable[[str, nn.Module], bool]) -> nn.Module:
        """The model computing in `dtype`; its inputs and outputs keep the types they have."""
        to_dtype(model, dtype, keep)
        return CastBoundary(model, dtype)

    @abstractmethod
    def observe(self, run: Run, dtype: torch.dtype) -> Any:
        """Return the values that the metric needs from a model, original or candidate: tensors, floats, or lists of
        them.
        """

    @abstractmethod
    def compare(self, reference: Any, candidate: Any) -> Quality:
        """Compute the metric of `candidate` against `reference`; both come from `observe`.

        Raises `WorkloadError` when the metric is not a finite number.
        """

    def side_by_side(self, reference: Any, candidate: Any) -> list[PictureRow]:
        """Return the examples that the report shows (`report.pictures`), worst first; both arguments come from
        `observe`.
        """
        return []

    def parts(self) -> tuple[str, ...]:
        """The model's children that have calls of their own, in the order in which a pass calls them; none of a model
        that is one."""
        return ()

    def delicate(self, model: nn.Module) -> tuple[str, ...]:
        """Modules of the original that are worth float32 where all others take half precision."""
        return ()

    def glance(self, run: Run) -> torch.Tensor | None:
        """Return a short answer of the whole model, used to measure the effect of changing one module.

        None if a module's own output is enough.
        """
        return None

    def calibration(self, dtype: torch.dtype) -> list[Case]:
        """Calls whose activations set quantization scales; the workload's own unless it has better ones."""
        return self.cases(dtype)

    def calibrates_apart(self) -> bool:
        """Check whether `calibration` uses only calls that the metric never sees."""
        return False

    def unseen(self) -> Self | None:
        """The same, with a metric that sees nothing of what this one's or `calibration` sees; None without more data.

        The search chooses by the one, and what it has chosen is judged by the other.
        """
        return None

    def varied(self) -> Self | None:
        """The same, judged by other values than those that calibrate it; None where `calibration` is apart from what is
        judged, or where values cannot be varied.

        Corrections that fit one set of values hide what quantization loses: they fit only those.
        """
        return None

    def sampled(self) -> tuple[int, int | None] | None:
        """Batches that the metric sees in a search, and all that there are, None for any number; or None without more.

        `unseen` takes as many after them. What is left is for `further`.
        """
        return None

    def further(self) -> Self | None:
        """The same, judged by up to four times as many batches; None where there is not a quarter more.

        For a loss within the budget whose interval is not: of 512 rows one that changed its class is 0.2%, and may be
        1.08% of all. A search's batches and held-out ones stay apart.
        """
        if (found := self.sampled()) is None:
            return None
        count, there = found
        most = (FURTHER - 1) * count
        more = most if there is None else min(most, (there - 2 * count) // 2)
        if more < max(1, count // 4):
            return None
        first, then = (count, 2 * count) if self.sample else (0, 2 * count + more)
        return self.judged_by([*range(first, first + count), *range(then, then + more)])

    def judged_after(self, seen: int, there: int | None) -> Self | None:
        """The same, judged by as many batches, after the `seen` first; None where there are not two left."""
        count = seen if there is None else min(seen, there - seen)
        return self.judged_by(range(seen, seen + count)) if count > 1 else None

    def judged_by(self, sample: Sequence[int]) -> Self:
        """The same, judged by these batches."""
        other = copy.copy(self)
        other.sample = sample
        return other

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Plain data for the recipe, by the keys that the class's own text names."""

    def made_again(self) -> bool:
        """Check whether the description is enough to rebuild the workload, as `torchwright verify` does."""
        return True

    def check_adapted(self, original: nn.Module, adapted: nn.Module) -> None:  # noqa: B027
        """Raises `ModelError` unless the adapted form computes what the original does."""

    def files(self, *, weights: bool) -> dict[str, Path]:
        """Files of the model's folder that an artifact needs: configuration and tokenizer, and weights if asked.

        Path inside the folder → where it is read from.
        """
        return {}

    def notices(self) -> tuple[str, ...]:
        """Return notices for the user before the search, such as the metric and why no better one is available."""
        return ()

    def properties(self, model: nn.Module) -> set[str]:
        """Properties of the original that techniques may need, beyond those read off its modules."""
        return set()


def check_sizes(description: dict[str, Any], *names: str) -> None:
    """Raise `ArtifactError` unless each of these is missing, None, or a batch size or token count."""
    for name in names:
        value = description.get(name)
        if value is not None and not (type(value) is int and 1 <= value <= LARGEST_SIZE):
            raise ArtifactError(f"{name} is {str(value)[:80]!r}", allowed=f"1 to {LARGEST_SIZE}")


def batches_to_judge(wanted: float, there: int | None) -> int:
    """Return how many batches judge the search, at least two: `wanted`, or half of the available ones (`there`)."""
    count = max(2, int(wanted))
    return count if there is None else min(count, there if there < 4 else there // 2)


def to_device(value: Any, device: str | torch.device) -> Any:
    """The same nested value with its tensors on `device`."""
    return nested.map_tensors(lambda tensor: tensor.to(device), value)


def own_tensors(value: Any) -> Any:
    """The same nested value with tensors of its own, laid out as they were; those that shared memory still do."""
    memo: dict[int, Any] = {}
    with torch.inference_mode(False):  # tensors of that mode are other inputs to who compiled for plain ones
        return nested.map_tensors(lambda tensor: copy.deepcopy(tensor, memo), value)


def changed_tensors(before: Any, after: Any) -> dict[int, torch.Tensor]:
    """The tensors of a nested value that a call has changed in place, by their number.

    What is not dense cannot be compared and counts as unchanged.
    """
    pairs = zip(nested.leaves(before), nested.leaves(after), strict=False)
    return {
        index: new
        for index, (old, new) in enumerate(pairs)
        if isinstance(old, torch.Tensor) and _is_dense(old) and not _same_bytes(old, new)
    }


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_quantized


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    def plain(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)

    return one.shape == other.shape and torch.equal(plain(one), plain(other))


def from_anywhere(run: Run, device: str) -> Run:
    """`run`, which takes tensors on `device`, for callers with others: outputs go where their first input came from.

    On a CPU it is `run` itself: looking at the inputs of a small model takes longer than it may.
    """
    if device == "cpu":
        return run

    def call(case: Case) -> Any:
        homes = [tensor.device for tensor in nested.tensors((case.args, case.kwargs))]
        if all(home.type == device for home in homes):
            return run(case)
        args, kwargs = to_device((case.args, case.kwargs), device)
        return to_device(run(replace(case, args=args, kwargs=kwargs)), homes[0])

    return call


class CastBoundary(nn.Module):
    """Casts floating-point inputs to `dtype` on the way in and floating-point outputs back on the way out."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype, outside: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.inner, self.dtype, self.outside = inner, dtype, outside

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _cast(args, self.outside, self.dtype), _cast(kwargs, self.outside, self.dtype)
        return _cast(self.inner(*args, **kwargs), self.dtype, self.outside)


FREQUENCIES = "inv_freq"
"""The end of the names of buffers that hold the frequencies of rotary embeddings."""


def to_dtype(model: nn.Module, dtype: torch.dtype, keep: Callable[[str, nn.Module], bool]) -> list[str]:
    """Cast parameters and buffers in place, but for the modules that `keep` names; returns the cast modules.

    Frequencies of rotary embeddings stay as they are, as in `from_pretrained`: in bfloat16 they are off by 0.4%, which
    at position 1,000 is another angle, and a held-out text may be too short to show it.
    """
    changed = []
    for name, module in model.named_modules():
        if keep(name, module):
            continue
        buffers = [buffer for key, buffer in module._buffers.items() if not key.endswith(FREQUENCIES)]
        tensors = [*module._parameters.values(), *buffers]
        if any(t is not None and t.is_floating_point() and t.dtype != dtype for t in tensors):
            changed.append(name)
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
                module._parameters[key] = parameter
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and not key.endswith(FREQUENCIES):
                module._buffers[key] = buffer.to(dtype)
    return changed


def fresh(model: nn.Module) -> nn.Module:
    """A deep copy in eval mode without gradients, what is parametrized (weight norm, …) computed once for all.

    Raises `ModelError` for a model that cannot be copied, is TorchScript, or has no data.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError(
            f"the model is a TorchScript module ({model.original_name})",
            allowed="the torch.nn.Module that it was made from",
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ModelError(
            f"parameters of {type(model).__name__} are on the meta device, without data",
            next="load the model's weights first",
        )
    try:
        with warnings.catch_warnings():
            # torch's, of the form in which it keeps nested values, where a module holds one.
            warnings.filterwarnings("ignore", category=FutureWarning, module="copyreg")
            model = copy.deepcopy(model).eval()
        for module in [module for module in model.modules() if parametrize.is_parametrized(module)]:
            _bake(module)
    except Exception as error:
        raise ModelError(
            f"the model {type(model).__name__} cannot be copied",
            found=f"{type(error).__name__}: {error}",
            next="make copy.deepcopy(model) work, or pass package.module:factory",
        ) from error
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


def _bake(module: nn.Module) -> None:
    """Make what is parametrized plain parameters.

    torch's `remove_parametrizations` takes the property from the class, which a deep copy shares with its original.
    """
    parametrized: Any = module
    values = {name: getattr(module, name).detach().clone() for name in parametrized.parametrizations}
    del parametrized.parametrizations
    module.__class__ = module.__class__.__bases__[0]
    for name, value in values.items():
        module.register_parameter(name, nn.Parameter(value, requires_grad=False))


def _cast(value: Any, source: torch.dtype, target: torch.dtype) -> Any:
    return nested.map_leaves(
        lambda leaf: leaf.to(target) if isinstance(leaf, torch.Tensor) and leaf.dtype == source else leaf,
        value,
    )
