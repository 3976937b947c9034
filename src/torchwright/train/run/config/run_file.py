"""Run files of any kind: from TOML to values checked by name and type, and how two of them differ (no torch)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from torchwright.core.errors import TorchwrightError, unknown
from torchwright.core.toml_file import load_toml
from torchwright.train.run.config.data_section import RunError
from torchwright.train.run.config.run import AnyRun


def read_toml(path: Path) -> dict[str, Any]:
    """Read the values of a run file of any kind. Raises `RunError` if it is missing."""
    try:
        return load_toml(path)
    except FileNotFoundError as error:
        raise RunError(
            f"there is no run file {path}", next="see docs/train.md for one to begin with"
        ) from error
    except (ValueError, OSError) as error:
        raise RunError(f"{path} is not a TOML file", found=str(error)) from error


def parse_file(kind: type[AnyRun], data: dict[str, Any], source: str, page: str = "docs/train.md") -> AnyRun:
    """A run of any kind from plain data; `page` has all of its fields. Raises as `read_run`."""
    try:
        # Through JSON's rules, by which a list may stand for a tuple.
        return kind.model_validate_json(json.dumps(data))
    except ValidationError as error:
        raise _readable(error, kind, source, page) from error
    except TypeError as error:  # a date or a time, which TOML has and JSON has not
        raise RunError(f"{source} holds a value of an unexpected type", found=str(error)) from error


def with_settings(values: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run file's values with fields set by their dotted names, as in `optimizer.lr`."""
    made = {name: dict(value) if isinstance(value, dict) else value for name, value in values.items()}
    for name, value in settings.items():
        section, _, rest = name.partition(".")
        if rest:
            inside = made.get(section)
            made[section] = with_settings(inside if isinstance(inside, dict) else {}, {rest: value})
        else:
            made[section] = value
    return made


def changed_fields(old: dict[str, Any], new: dict[str, Any], ignore: tuple[str, ...] = ()) -> list[str]:
    """`name: old → new` of each field that differs, within tables as `table.name`; those of `ignore` may."""
    changed: list[str] = []
    for name in sorted({*old, *new}):
        one, other = old.get(name), new.get(name)
        if name in ignore or one == other:
            continue
        if isinstance(one, dict) and isinstance(other, dict):
            inside = tuple(part.removeprefix(f"{name}.") for part in ignore if part.startswith(f"{name}."))
            changed += [f"{name}.{field}" for field in changed_fields(one, other, inside)]
        else:
            changed.append(f"{name}: {_short(one)} → {_short(other)}")
    return changed


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:79] + "…"


def _readable(error: ValidationError, kind: type[BaseModel], source: str, page: str) -> TorchwrightError:
    """The first fault as one sentence; an unknown field before others, since it may be a missing one misspelt."""
    errors = sorted(error.errors(), key=lambda fault: fault["type"] != "extra_forbidden")
    first = errors[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        section = _section(kind, first["loc"][:-1])
        return unknown(f"field of {source}", where, _names(section, first["loc"][:-1]))
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    given = first.get("input")
    found = f"{where} = {_short(given)}" if isinstance(given, str | int | float | bool) else None
    message = first["msg"].removeprefix("Value error, ")
    return RunError(f"{source}: {where or 'the file'}: {message}{more}", found=found, next=f"see {page}")


def _section(kind: type[BaseModel], path: tuple[int | str, ...]) -> type[BaseModel]:
    """The model of the section at `path`."""
    section = kind
    for part in path:
        if field := section.model_fields.get(str(part)):  # else a name in a table of sections
            kinds = _within(field.annotation)
            section = next(
                (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), section
            )
    return section


def _within(annotation: Any) -> list[Any]:
    """A type and those that it is made of."""
    return [annotation, *(kind for part in get_args(annotation) for kind in _within(part))]


def _names(section: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    prefix = "".join(f"{part}." for part in path)
    return [f"{prefix}{name}" for name in section.model_fields]
