"""From what the user names, or what a recipe keeps, to its workload."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchwright.core.errors import ArtifactError, ModelError, WorkloadError
from torchwright.hub.folder import BUNDLED
from torchwright.workloads.base import Workload, blaming, class_of, workloads
from torchwright.workloads.factory import names_factory, refuse_python_file


def from_target(target: str | None, **options: Any) -> Workload:
    """Return the workload of a model as named on the command line.

    `target` may be None or "bundled" (the bundled language model), `package.module:factory`, `file.py:factory`, a
    Hugging Face folder or a hub id. A workload with a model of its own is chosen by name. `options` are the workload's
    own, such as batch, prompt_tokens, new_tokens, eval_text, tokens; None leaves an option at the workload's default.

    Raises `ModelError` for a model that is missing or of no supported kind, `WorkloadError` for an option that its
    workload does not take.
    """
    given = {key: value for key, value in options.items() if value is not None}
    if target is None or (target == BUNDLED and not Path(target).exists()):
        return _make(workloads.get("language"), "the bundled language model", None, given)
    if names_factory(target):
        from torchwright.workloads.module import from_factory

        _refuse_options(workloads.get("module"), target, given, positional=2)
        return from_factory(target)
    refuse_python_file(target)
    if target in workloads.names() and not Path(target).exists():
        return _by_workload_name(target, given)
    from torchwright.hub.folder import resolve

    folder = resolve(target)
    cls = kind_of(folder)
    _refuse_options(cls, target, given, positional=1)
    with blaming(cls, "__init__"):
        workload = _make(cls, target, folder, given)
    workload.label = target
    return workload


def _by_workload_name(name: str, options: dict[str, Any]) -> Workload:
    """The workload of that name on its bundled model. Raises `ModelError` if it has none."""
    cls = workloads.get(name)
    if name != "language":
        raise ModelError(
            f"'{name}' is the name of a workload that brings no model of its own",
            allowed="language, which brings the bundled model; or a model's folder, hub id or package.module:factory",
            next=f"pass the folder of one of these: {cls.supports}" if cls.supports else None,
        )
    return _make(cls, "the bundled language model", None, options)


def settings_of(words: Sequence[str]) -> dict[str, Any]:
    """A workload's options from NAME=VALUE; a value is what it says as JSON, or else the text itself."""
    found: dict[str, Any] = {}
    for word in words:
        name, _, text = word.partition("=")
        if not (text and name.replace("-", "_").isidentifier()):
            raise WorkloadError(
                f"--set {word}", allowed="NAME=VALUE", next="`torchwright workloads` lists names"
            )
        try:
            found[name.replace("-", "_")] = json.loads(text)
        except ValueError:
            found[name.replace("-", "_")] = text
    return found


def from_description(
    description: dict[str, Any], folder: Path | None = None, *, trust: bool = False, **options: Any
) -> Workload:
    """Rebuild the workload that `Workload.describe()` described, with `options` in place of its own unless they are
    None.

    `folder` is the model's present location, such as the artifact's own copy. Without it the recorded location is
    used. A description may be untrusted: only with `trust` are the names in it imported, or opened outside `folder`.

    Raises `ArtifactError` for an invalid description, for a model that only its owner can build, and for one that
    needs trust; `WorkloadError` for an option that the workload does not take.
    """
    cls = class_of(description)
    label = description.get("model")
    if not isinstance(label, str):
        raise ArtifactError("the recipe does not say which model it is for", found=repr(label)[:80])
    changes = {key: value for key, value in options.items() if value is not None}
    _refuse_options(cls, label, changes, positional=1)
    if cls.from_code:
        return _module(description, label, trust)
    accepted = _options(cls, positional=1)
    if not trust:
        _refuse_outside(cls, description, label, folder, changes)
    description = description | changes
    given = {key: value for key, value in description.items() if key in accepted and value is not None}
    where = folder
    if where is None and label != "bundled":
        from torchwright.hub.folder import resolve

        where = resolve(label)
    try:
        workload = _make(cls, label, where, given)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ArtifactError(
            "the recipe's workload cannot be read", found=f"{type(error).__name__}: {error}"
        ) from error
    workload.label = label
    return workload


def check_described(workload: Workload) -> None:
    """Raise `WorkloadError` unless `describe` returns what its docstring asks for.

    An artifact with a description from which it cannot be rebuilt could be neither loaded nor verified.
    """
    cls = type(workload)
    with blaming(cls, "describe"):
        description = workload.describe()
    fault = _fault_of(cls, description)
    if fault is not None:
        raise WorkloadError(
            f"{cls.__qualname__}.describe() gives nothing that the workload could be made again from",
            found=fault,
            allowed="kind, model, and every option by its name, as plain data",
            next="see the docstring of torchwright.workloads.base.Workload, or docs/workload.md",
        )


def _fault_of(cls: type[Workload], description: Any) -> str | None:
    """Return the fault of a description that was just built, or None."""
    if not isinstance(description, dict):
        return f"a {type(description).__name__}"
    try:
        json.dumps(description, allow_nan=False)
    except (TypeError, ValueError) as error:
        return str(error)
    if description.get("kind") != cls.name:
        return f"kind is {description.get('kind')!r}, the class's name is {cls.name!r}"
    if not isinstance(description.get("model"), str):
        return f"model is {description.get('model')!r}"
    parameters = list(inspect.signature(cls).parameters.values())[1:]
    needed = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    missing = [] if cls.from_code else [name for name in needed if description.get(name) is None]
    if missing:
        return f"the options {', '.join(missing)} are missing"
    try:
        cls.check(description)
    except ArtifactError as error:
        return str(error)
    return None


def _refuse_outside(
    cls: type[Workload],
    description: dict[str, Any],
    label: str,
    folder: Path | None,
    changes: dict[str, Any],
) -> None:
    """Refuse what a description would have opened that lies outside of `folder`."""
    if folder is None and label != "bundled":
        raise _untrusted(f"a model to open ({label[:200]})")
    for option in sorted(cls.opens - changes.keys()):
        if (file := description.get(option)) is not None:
            raise _untrusted(f"a text to open ({str(file)[:200]})")


def _untrusted(what: str) -> ArtifactError:
    return ArtifactError(
        f"the recipe names {what}, and it may be somebody else's",
        next="trust=True in Python, or --trust, does what it says",
    )


def kind_of(folder: Path) -> type[Workload]:
    """Return the workload for a Hugging Face folder.

    Raises `ModelError`, which lists the supported kinds, when there is none.
    """
    from torchwright.hub.folder import read_config

    apart = any((folder / index).is_file() for index in ("modules.json", "model_index.json"))
    config = {} if apart and not (folder / "config.json").is_file() else read_config(folder)
    for _, cls in sorted(workloads, key=lambda item: item[1].leftovers):
        with blaming(cls, "accepts"):
            if cls.accepts(folder, config):
                return cls
    supported = [f"{cls.supports} ({name})" for name, cls in workloads if cls.supports]
    raise ModelError(
        f"{folder} holds a model of an architecture that is not supported",
        found=", ".join(map(str, config.get("architectures") or ["no architectures in config.json"])),
        allowed="; ".join(supported),
        next="any other model can be given as package.module:factory, which returns a module and example inputs",
    )


def _module(description: dict[str, Any], label: str, trust: bool) -> Workload:
    from torchwright.workloads.module import from_factory

    if not names_factory(label) or description.get("metric"):
        what = (
            f"with the metric '{description['metric']}'"
            if description.get("metric")
            else "that is no factory"
        )
        raise ArtifactError(
            f"this recipe is for {label}, a module {what}: a file cannot keep its code",
            next="pass the model: tw.load(DIR, model=…) in Python",
        )
    if not trust:
        raise _untrusted(f"a factory to run ({label[:200]})")
    workload = from_factory(label)
    workload.task = str(description.get("task") or workload.task)
    return workload


def _make(cls: type[Workload], what: str, folder: Path | None, options: dict[str, Any]) -> Any:
    _refuse_options(cls, what, options, positional=1)
    make: Any = cls
    return make(folder, **options)


def _refuse_options(cls: type[Workload], what: str, options: dict[str, Any], *, positional: int) -> None:
    accepted = _options(cls, positional=positional) if not cls.from_code else []
    for key in options:
        if key not in accepted:
            raise WorkloadError(
                f"the option {key.replace('_', '-')} is not for {what}, which is run as the workload '{cls.name}'",
                allowed=", ".join(name.replace("_", "-") for name in accepted) or "none: its inputs say all",
            )


def _options(cls: type[Workload], *, positional: int) -> list[str]:
    return list(inspect.signature(cls).parameters)[positional:]
