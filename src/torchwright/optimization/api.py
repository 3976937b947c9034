"""The public functions, and what the command line calls."""

from __future__ import annotations

import inspect
import re
import statistics
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import nn

from torchwright.core import duration
from torchwright.core.errors import (
    Inconclusive,
    RegressionFound,
    TechniqueFailed,
    TrainingMode,
    WorkloadError,
    unknown,
)
from torchwright.core.process import folders, interrupts
from torchwright.core.records import (
    VERIFY_RETRIES,
    VERIFY_TOLERANCE,
    Budget,
    Event,
    Interval,
    Objective,
    Recipe,
    RooflinePoint,
    Step,
    StepResult,
    current_name,
)
from torchwright.core.share import share
from torchwright.hardware.devices import default_name
from torchwright.hardware.measure.clock import Rounds, paired_speedup
from torchwright.hardware.measure.roofline import Work, point
from torchwright.hub.folder import MTP, read_config, resolve
from torchwright.optimization import decode_bench
from torchwright.optimization.artifact import folder as artifact
from torchwright.optimization.artifact.folder import Manifest
from torchwright.optimization.artifact.result import Result
from torchwright.optimization.engines.base import engines
from torchwright.optimization.engines.identity import identity
from torchwright.optimization.open_model import is_artifact, promise, refuse_for_artifact
from torchwright.optimization.optimize import optimize as run_optimize
from torchwright.optimization.proof.verify_artifact import OriginalInProcess, original_in_process
from torchwright.optimization.rebuild import MEASURE_SECONDS, from_factory, trials, workload_of
from torchwright.optimization.search.experience import TABLE
from torchwright.optimization.search.state import Request
from torchwright.optimization.techniques.base import from_step, parse_step, techniques
from torchwright.optimization.trial.client import TrialProcess, judge
from torchwright.report.terminal import LiveProgress
from torchwright.workloads.base import Workload
from torchwright.workloads.detect import from_target, settings_of
from torchwright.workloads.module import ModuleWorkload

VERIFY_ROUNDS = 9
BUSY_CLAIM = 2.0
"""Factor to which a claim holds that was made on a busy machine."""
BUSY_TIMES = 4
"""Factor on the turns of `verify` on a busy machine: disturbed turns vary about twice as much."""


def optimize(
    model: nn.Module | str | Path,
    inputs: Any = None,
    *,
    max_drop: float | str = Budget.max_drop,
    metric: Callable[[Any], float] | None = None,
    higher_is_better: bool = True,
    task: str = "regression",
    objective: Objective = Budget.objective,
    time_budget: float | str = Budget.time_seconds,
    device: str | None = None,
    techniques: Sequence[str] | None = None,
    without: Sequence[str] = (),
    dynamic: Any = None,
    on_new_shape: Literal["run", "error"] = "run",
    progress: bool = True,
    seed: int = 0,
    resume: Result | str | Path | None = None,
    exhaustive: bool = False,
    **options: Any,
) -> Result:
    """Find the fastest way to run `model` on this machine within an accuracy budget.

    `model` is a module with its `inputs`, or what the command line names: a model's folder, a hub id, an artifact,
    `package.module:factory`, `file.py:factory`, or `"bundled"`. These bring inputs and metric of their own; `options`
    are then the workload's, such as `batch=8`, as `torchwright workloads` lists them.

    `inputs` is a tuple of positional arguments, a dict of keyword arguments, a tensor, or a list of these for several
    shapes. The budget `max_drop`, such as 0.05 or "5%", is held against the upper end of the metric's 95% interval. The
    metric is the relative error of the outputs. With `task="classification"` it is the share of rows whose top-1 answer
    changed. With `metric`, a callable of model → float, it is the loss relative to the original's value.

    `time_budget` is for the search once the original is measured: seconds, or a text such as `"2m"`. `techniques`
    names the only ones to try, as `name` or `name:option=value`; `without` names those never to try. The progress is
    shown on stderr unless `progress=False`. `resume` continues the search of an earlier result, or of the folder in
    which one was saved: what was measured is kept, and what was left untried is tried. `exhaustive` goes without the
    experience of recorded searches (docs/search.md), which orders the trials.

    `result.model` takes what the original takes. Compiled code takes other batch sizes; other sizes and types use a
    fallback, with one `SlowerCall` warning; with `on_new_shape="error"` they are refused. `dynamic` says which
    sizes vary, in `torch.export`'s form of `dynamic_shapes`; without it the batch dimension is detected.

    The caller's model is never changed. Of a model in training mode, wholly or in part, the `eval()` copy is optimized,
    with a `TrainingMode` warning and a note in the report. Trials run in fresh processes, to which the model travels by
    cloudpickle.

    Raises `TorchwrightError` or a subclass for inputs, names or a metric that cannot be used, and for a model that
    fails on its own inputs; `ArtifactError` for a search that cannot be continued here.
    """
    judged = {"metric": metric, "higher_is_better": higher_is_better, "task": task, "dynamic": dynamic}
    if isinstance(model, str | Path):
        workload = _named_workload(str(model), inputs, judged, options)
    else:
        _refuse_unknown(options)
        workload = ModuleWorkload(model, inputs, **judged)
    if isinstance(workload, ModuleWorkload) and workload.training_notice:
        warnings.warn(workload.training_notice, TrainingMode, stacklevel=2)
    request = Request(
        workload=workload,
        budget=Budget(
            max_drop=share(max_drop, "max_drop"),
            objective=objective,
            time_seconds=duration.seconds(time_budget),
        ),
        device=device,
        wanted=[parse_step(text) for text in techniques or ()],
        only=techniques is not None,
        without=_known(without),
        seed=seed,
        resume=resume.path if isinstance(resume, Result) else Path(resume) if resume is not None else None,
        experience=None if exhaustive else TABLE,
        command="torchwright.optimize(…)",
    )
    with interrupts.deferred():
        keep = folders.make_temporary()  # lives as long as the result does
        out = keep.path / "artifact"
        try:
            with LiveProgress(quiet=not progress) as show:
                recipe = run_optimize(request, out, show)
            original = workload.model if isinstance(workload, ModuleWorkload) else None
            result = Result(out, recipe, original=original, on_new_shape=on_new_shape)
        except BaseException:
            keep.remove()
            raise
        weakref.finalize(result, keep.remove)
    return result


def _named_workload(target: str, inputs: Any, judged: dict[str, Any], options: dict[str, Any]) -> Workload:
    """The workload of a target in words. Raises `WorkloadError` for what only goes with a module."""
    given = [name for name, value in judged.items() if value != _DEFAULTS[name].default]
    given += ["inputs"] if inputs is not None else []
    if given:
        raise WorkloadError(
            f"{', '.join(f'{name}=' for name in given)} cannot be combined with the model '{target}'",
            found="a name of a model, which brings its own inputs and metric",
            allowed="with a torch.nn.Module",
        )
    return _workload_of_target(target, options)


def _workload_of_target(target: str | None, options: dict[str, Any]) -> Workload:
    """The workload of an artifact, or of a model as the command line names it."""
    if target and is_artifact(target):
        recipe, _ = artifact.open_artifact(Path(target))
        return workload_of(Path(target), recipe, trust=False, **options)
    return from_target(target, **options)


def _refuse_unknown(options: dict[str, Any]) -> None:
    for name in options:
        raise unknown("option of tw.optimize with a module", name, _DEFAULTS.keys() - {"options"})


_DEFAULTS = inspect.signature(optimize).parameters


def optimize_cli(
    target: str | None,
    *,
    max_drop: float,
    objective: Objective,
    time_budget: float,
    batch: int | None,
    prompt_tokens: int | None,
    new_tokens: int | None,
    tokens: int | None,
    eval_text: str | None,
    audio: Sequence[str] = (),
    reference: Sequence[str] = (),
    images: str | None = None,
    points: str | None = None,
    steps: int | None = None,
    size: str | None = None,
    prompts: str | None = None,
    settings: Sequence[str] = (),
    draft: str | None = None,
    with_steps: Sequence[str],
    only: Sequence[str] = (),
    without: Sequence[str],
    device: str | None,
    out: str | None,
    seed: int,
    resume: bool = False,
    exhaustive: bool = False,
    on_event: Callable[[Event], None],
    command: str,
) -> Result:
    """Run `torchwright optimize`. `only` takes the place of `with_steps` and excludes all others but `draft`."""
    wanted = asked_for(only or with_steps, draft)
    never = _known(without)
    options: dict[str, Any] = {"batch": batch, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens}
    options |= {"tokens": tokens, "eval_text": eval_text, "images": images, "points": points}
    options |= {"steps": steps, "size": size, "prompts": prompts}
    options |= {name: list(files) for name, files in (("audio", audio), ("reference", reference)) if files}
    options |= settings_of(settings)
    workload = _workload_of_target(target, options)
    folder = Path(out) if out else Path(default_out(target))
    request = Request(
        workload=workload,
        budget=Budget(max_drop=max_drop, objective=objective, time_seconds=time_budget),
        device=device,
        wanted=wanted,
        only=bool(only),
        without=never,
        seed=seed,
        resume=folder if resume else None,
        experience=None if exhaustive else TABLE,
        command=command,
    )
    recipe = run_optimize(request, folder, on_event)
    return Result(folder, recipe)


def asked_for(words: Sequence[str], draft: str | None) -> list[Step]:
    """Return the steps that the command line names, `draft` by its folder; raises `ModelError` if that is missing."""
    if draft == MTP:
        raise WorkloadError(
            f"--draft {MTP}: an artifact does not carry the model's MTP layer",
            allowed="an EAGLE-3 head, or a small model with the same tokens",
            next=f"serve the model's own folder with `--draft {MTP}`",
        )
    if draft is not None:
        read_config(resolve(draft))
    return [*map(parse_step, words), *_draft_steps(draft)]


def _draft_steps(folder: str | None) -> list[Step]:
    return [] if folder is None else [Step(name="draft", options={"folder": folder})]


def asked_and_failed(
    result: Result, with_steps: Sequence[str], facts: dict[str, Any], draft: str | None = None
) -> TechniqueFailed | None:
    """The error for steps asked for by name of which nothing was measured; `facts` is the result all the same."""
    failed: list[StepResult] = []
    for step in [*map(parse_step, with_steps), *_draft_steps(draft)]:
        alike = [rung for rung in result.steps if rung.step.name == step.name]
        rows = alike if from_step(step).is_open else [rung for rung in alike if rung.step == step]
        if all(rung.status in ("failed", "untried") for rung in rows):
            failed += rows
    if not failed:
        return None
    return TechniqueFailed(
        f"{' and '.join(str(rung.step) for rung in failed)} was asked for and not measured",
        found="; ".join(f"{rung.step}: {rung.reason}" for rung in failed),
        next="--resume with a larger --time-budget"
        if any(rung.status == "untried" for rung in failed)
        else None,
        facts=facts,
    )


def default_out(target: str | None) -> str:
    """The artifact folder when none is named: `torchwright-` and the model's name, in the current folder."""
    name = re.sub(
        r"[^\w.-]+", "-", Path(target or "bundled").name if ":" not in (target or "") else str(target)
    )
    return f"torchwright-{name.strip('-')}"


def verify(
    path: str | Path,
    *,
    trust: bool = False,
    tolerance: float = VERIFY_TOLERANCE,
    retries: int = VERIFY_RETRIES,
    on_event: Callable[[Event], None] = lambda event: None,
) -> dict[str, Any]:
    """Measure an artifact's speed-up over the original and its metric again, and compare both with its recipe.

    The speed holds if its whole interval is above the low end of the recipe's, less the share `tolerance`; above half
    of it where the recipe's was measured on a busy machine. If the interval decides nothing, as many turns are taken
    again, at most `retries` times, and `BUSY_TIMES` as often while other programs use the cores. A result on a busy
    machine does not count as a regression.

    Raises `RegressionFound` if the artifact is slower than promised or over the budget, and `Inconclusive` if the turns
    did not decide; `facts` of both holds the measurements. Raises `ArtifactError` as `load` does.
    """
    path = Path(path)
    recipe, _ = artifact.open_artifact(path)
    workload = workload_of(path, recipe, trust=trust)
    begun, rounds = time.monotonic(), Rounds[tuple[float, float]](enough=VERIFY_ROUNDS)
    at_least = _at_least(recipe, tolerance)

    def tell(text: str) -> None:
        seconds = time.monotonic() - begun
        on_event(Event(kind="stage", text=text, elapsed=seconds, time_budget=MEASURE_SECONDS))

    with trials(path, workload, recipe.fingerprint.device.kind, recipe) as context:
        tell("the artifact, loaded in a new process, and the original")
        candidate = TrialProcess(context, essential=True)
        loaded = candidate.ask("load_artifact", path=str(path), trust=trust)
        original = original_in_process(candidate, workload, recipe.steps)
        if original is None:
            original = TrialProcess(context, essential=True)
            original.ask("prepare", steps=())
        # Without the user's module the artifact's own graph is the original: there is nothing to be faster than.
        speedup, verdict = recipe.speedup, "inconclusive" if workload.has_model else "holds"
        count, most, busy = 0, retries + 1, False
        while verdict == "inconclusive" and count < most:
            count += 1
            tell(f"timing both in turn, {count} of {most} times at most")
            for _ in range(VERIFY_ROUNDS):
                rounds.add(*_paired_turn(recipe, original, candidate))
            speedup = paired_speedup(*zip(*rounds.counted, strict=True))
            busy = rounds.busy or context.sampled_load().crowded
            verdict = _speed_verdict(speedup, at_least, busy=busy)
            most = (retries + 1) * (BUSY_TIMES if busy else 1)
        load = context.load()
        tell("the metric of both")
        reference = original.ask("observe", unseen=True)
        unseen = reference is not None
        reference = reference if unseen else original.ask("observe")
        quality = judge(
            candidate,
            recipe.budget.max_drop,
            reference=reference,
            further=partial(original.ask, "observe", unseen=unseen, further=True),
            unseen=unseen,
        )
    over = recipe.steps and quality.drop_high > recipe.budget.max_drop
    differs = _other_original(recipe, workload) if over else None
    found = {
        "verdict": "broken" if over else verdict,
        "runs_as": loaded.how,
        "speedup": str(speedup),
        **promise(recipe),
        "at_least": at_least,
        "turns": len(rounds.counted),
        "busy": str(load) if busy else None,
        "metric": quality.metric,
        "drop": quality.drop,
        "drop_high": quality.drop_high,
        "max_drop": recipe.budget.max_drop,
        "notices": list(loaded.notices),
    }
    if over:
        raise RegressionFound(
            f"{path} is over its accuracy budget",
            found=f"{quality.metric} {quality.worsens} by {quality.drop:.2%}, up to {quality.drop_high:.2%}",
            allowed=f"{recipe.budget.max_drop:.2%}",
            next=differs or "optimize again",
            facts=found | ({"original": differs} if differs else {}),
        )
    if verdict == "holds":
        return found
    undecided = f"the speed of {path} was not " + (f"measured: machine busy, {load}" if busy else "decided")
    raise (RegressionFound if verdict == "broken" else Inconclusive)(
        f"{path} is slower than it was" if verdict == "broken" else undecided,
        found=f"{speedup} against the original in {len(rounds.counted)} turns",
        allowed=f"{at_least:.2f}x at least: {recipe.speedup} in the recipe, less {tolerance:.0%}"
        + (f", to a factor of {BUSY_CLAIM:.0f}" if recipe.speedup.busy else ""),
        next="look for other work on the machine, then "
        + ("optimize again" if verdict == "broken" else "more --retries, or a larger --tolerance"),
        facts=found,
    )


def _other_original(recipe: Recipe, workload: Workload) -> str | None:
    """Say what to do where a factory gives another model than the one that was optimized; None where it is the same."""
    if not from_factory(recipe) or recipe.original is None:
        return None
    here = identity(workload.build())
    if here == recipe.original:
        return None
    if here.structure != recipe.original.structure:
        return "optimize again: the factory returns a model of other layers now"
    return "optimize again if the model was trained since; its factory must return the same weights at every call"


def _paired_turn(
    recipe: Recipe, original: TrialProcess | OriginalInProcess, candidate: TrialProcess
) -> tuple[tuple[float, float], float]:
    """Time both once: seconds of a pass of either, and the larger share of a turn that was spent waiting for a core."""
    seconds: list[float] = []
    waited = 0.0
    for process, measured in ((original, recipe.baseline), (candidate, recipe.final)):
        turn = process.ask("time")
        seconds.append(sum(turn[case.name] * case.repeat for case in measured.cases))
        waited = max(waited, process.ask("waited"))
    return (seconds[0], seconds[1]), waited


def _at_least(recipe: Recipe, tolerance: float) -> float:
    """The least speed-up that holds.

    What was measured on a busy machine holds to a factor of two, and no further than that it is not slower: neighbours
    slow the original and the candidate, and not alike.
    """
    if recipe.budget.objective == "memory":
        return 0.0
    low = recipe.speedup.low
    return (1 - tolerance) * (max(low / BUSY_CLAIM, min(low, 1.0)) if recipe.speedup.busy else low)


def _speed_verdict(speedup: Interval, at_least: float, *, busy: bool) -> str:
    """Say whether an interval keeps a promise, breaks it, or says neither.

    On a busy machine no promise is broken: other programs may cause the whole difference.
    """
    if speedup.low >= at_least:
        return "holds"
    lower = speedup.high < at_least and not speedup.disturbed
    return "broken" if lower and not busy else "inconclusive"


def bench(
    target: str | Path,
    *,
    prompt_tokens: int | None = None,
    new_tokens: int | None = None,
    batch: int | None = None,
    quantize: str | None = None,
    kv: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    trust: bool = False,
) -> dict[str, Any]:
    """Time an artifact, or a model as it is: seconds per call, tokens per second, memory, share of the roofline.

    With one of `quantize`, `kv` and `dtype` a language model runs on the native decoder instead, without a search.
    For an artifact `batch` replaces the example's batch size, if its calls take any.
    """
    target = str(target)
    options: dict[str, Any] = {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "batch": batch}
    decoder = {"quantize": quantize, "kv": kv, "dtype": dtype}
    recipe: Recipe | None = None
    batched, rows = (), None
    where = device or default_name()
    if is_artifact(target):
        refuse_for_artifact(target, **decoder, device=device)
        recipe, manifest = artifact.open_artifact(Path(target))
        where = recipe.fingerprint.device.kind
        if engines.get(manifest.engine).whole:  # which takes any size, not only the one it was searched at
            searched = {name: recipe.workload.get(name) for name in options}
            given = {name: value for name, value in options.items() if value is not None}
            return decode_bench.bench(target, where, trust=trust, **(searched | given))
        batched, rows = _other_rows(target, recipe, manifest, options)
        own = (
            manifest.measured_on_module and from_factory(recipe) and (trust or artifact.is_own(Path(target)))
        )
        workload = workload_of(
            Path(target), recipe, trust=trust, cases_only=manifest.self_contained and not own
        )
    elif any(value is not None for value in decoder.values()):
        return decode_bench.bench(target, where, **decoder, **options)
    else:
        workload = from_target(target, **options)
    with trials(target, workload, where, recipe) as context:
        process = TrialProcess(context)
        if recipe:
            ready = process.ask("load_artifact", path=str(target), trust=trust)
            if rows is not None:
                process.ask("resize", batched=batched, rows=rows)
        else:
            ready = process.ask("prepare", steps=())
        turns = [process.ask("time") for _ in range(VERIFY_ROUNDS)]
        memory = process.ask("memory").peak
    medians = {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}
    result: dict[str, Any] = {"runs_as": ready.how if recipe else "the original, eager"}
    if recipe:
        result |= promise(recipe)
    if rows is not None:
        result["batch"] = rows
    result["ready_s"] = ready.seconds
    for name, seconds in medians.items():
        result[f"{name}_s"] = seconds
    rates = workload.rates(workload.describe(), medians)
    result |= rates
    result["peak_memory_bytes"] = memory
    points = {found.case: found for found in _bounds(recipe if rows is None else None, medians)}
    for name in medians if rates else points:
        result |= decode_bench.roofline_facts(name, points.get(name))
    return result


def _other_rows(
    target: str, recipe: Recipe, manifest: Manifest, options: dict[str, int | None]
) -> tuple[tuple[int, ...], int | None]:
    """The tensors that have rows, and how many were asked for where that is not the example's number.

    Raises `WorkloadError` for a size that the artifact's calls do not take.
    """
    rows = None
    for option, value in options.items():
        searched = recipe.workload.get(option)
        if value is None or value == searched:
            continue
        free = any(call.sizes for call in manifest.calls)  # of another library, which answers them itself
        takes = manifest.rows != "fixed" or free or manifest.any_sizes is not None
        if option == "batch" and manifest.takes.batched and takes and len(recipe.final.cases) == 1:
            rows = value
            continue
        flag = f"--{option.replace('_', '-')}"
        if searched is None:
            raise WorkloadError(
                f"{target} was made for the calls that it was timed on, and takes no {flag}",
                next="optimize again with inputs of that size",
            )
        raise WorkloadError(
            f"{target} was compiled for {option} {searched}, not {value}",
            next=f"optimize again with {flag} {value}",
        )
    return manifest.takes.batched, rows


def _bounds(recipe: Recipe | None, medians: dict[str, float]) -> list[RooflinePoint]:
    """The recipe's roofline with the times of today."""
    if recipe is None:
        return []
    points = []
    for then in recipe.roofline:
        if then.stage == "final" and then.case in medians:
            work = Work(bytes=then.bytes, operations={then.dtype: then.operations})
            points.append(point(then.case, medians[then.case], work, recipe.fingerprint.device))
    return [found for found in points if found is not None]


def _known(names: Sequence[str]) -> frozenset[str]:
    """Return the techniques' names of today. Raises `UnknownName` for a name that nobody registered."""
    return frozenset(techniques.get(current_name(name)).name for name in names)


__all__ = ["bench", "optimize", "optimize_cli", "verify"]
