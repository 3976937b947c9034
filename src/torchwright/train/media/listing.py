"""File lists of a run: pictures in folders of classes, tables that name pictures or sounds. Nothing is opened.

A table names files below its own folder; a row that names anything else is broken.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torchwright.core.paths import private_cache
from torchwright.core.process.files import replacing
from torchwright.core.rows import READERS, DataRow, is_dataset, is_rows, read_rows
from torchwright.models.vision.picture import SUFFIXES
from torchwright.train.data.documents import FileReport
from torchwright.train.data.hold_out import drawing_order, held_rows
from torchwright.train.data.messages import PICTURE_PARTS, RowFault, from_json
from torchwright.train.data.shards import DataError
from torchwright.train.data.text import expand
from torchwright.train.media.config import ChatData, ImageData, SpeechData

CACHE = "media"
"""The folder of the user's cache with the files that tables hold themselves."""
METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
"""Tables of a folder that name its files in a column `file_name`."""
SYNONYMS = {
    "image": ("file_name", "img", "image_path"),
    "label": ("labels", "fine_label", "class", "category"),
    "audio": ("file_name", "audio_path", "path", "file", "audio_filepath"),
    "text": ("sentence", "transcription", "transcript", "transcript_text", "normalized_text"),
    "messages": ("conversations", "conversation"),
    "images": ("image",),
}
"""Names of columns in published data sets, tried in turn where a table has no column by the usual name."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """A file and its training target."""

    path: Path
    target: str | int
    """A class by its name or place, or a text."""
    number: int
    """In the folder or table that names it, from 1."""
    language: str | None = None


@dataclass
class Listing:
    """The items of several folders or tables."""

    items: list[Item] = field(default_factory=list)
    reports: dict[str, FileReport] = field(default_factory=dict)
    """Folder or table → what became of its rows."""

    def by_source(self) -> list[tuple[str, list[Item]]]:
        """The items of each folder or table."""
        found, first = [], 0
        for source, report in self.reports.items():
            found.append((source, self.items[first : first + report.documents]))
            first += report.documents
        return found

    def digest(self) -> str:
        """Hash of the items, without the contents of their files."""
        made = hashlib.sha256()
        for item in self.items:
            made.update(f"{item.path.name}\0{item.target}\0{item.language}\n".encode())
        return made.hexdigest()[:16]


def list_images(patterns: Sequence[str], data: ImageData, folder: Path) -> Listing:
    """Raises `DataError` for what is neither a folder of classes nor a table, and for one without a picture."""
    listing = Listing()
    for path in _sources(patterns, folder):
        report = listing.reports[str(path)] = FileReport()
        if (table := _metadata(path)) is not None:
            items = _table(table, report, data.image_column, data.label_column, (str, int))
        elif path.is_dir() and not is_dataset(path):
            items = _classes(path, report)
        else:
            items = _table(path, report, data.image_column, data.label_column, (str, int))
        listing.items += _kept(path, items, report, data.strict)
    return listing


def list_sounds(patterns: Sequence[str], data: SpeechData, folder: Path) -> Listing:
    """Like `list_images`, for manifests."""
    listing = Listing()
    for path in _sources(patterns, folder):
        report = listing.reports[str(path)] = FileReport()
        table = _metadata(path) or path
        items = _table(table, report, data.audio_column, data.text_column, (str,), data.language_column)
        listing.items += _kept(path, items, report, data.strict)
    return listing


def list_chats(patterns: Sequence[str], data: ChatData, folder: Path) -> Listing:
    """List the rows of tables of conversations, whose pictures lie below the table's folder or in the row.

    An item's path is the table's with the row's number behind it, and its target the row as JSON. Raises `DataError`.
    """
    listing = Listing()
    for path in expand(patterns, folder):
        report = listing.reports[str(path)] = FileReport()
        listing.items += _kept(path, _chats(path, report, data), report, data.strict)
    return listing


def _chats(path: Path, report: FileReport, data: ChatData) -> Iterator[Item]:
    root = path.resolve().parent if not path.is_dir() else path.resolve()
    for row in _rows(path):
        report.rows += 1
        messages = from_json(row.values.get(_named(row.values, data.messages_column)))
        images = from_json(row.values.get(_named(row.values, data.images_column)))
        images = images if isinstance(images, list) else [] if images is None else [images]
        try:
            if row.fault:
                raise RowFault(row.fault)
            if not isinstance(messages, list) or not messages:
                raise RowFault(f"'{data.messages_column}' is no list of messages")
            whole = {
                "messages": _located(messages, root),
                "images": [_located_picture(one, root) for one in images],
            }
            target = json.dumps(whole, sort_keys=True)
        except (RowFault, TypeError, ValueError) as fault:
            report.refuse(row.number, str(fault))
            continue
        yield Item(path=Path(f"{path}:{row.number}"), target=target, number=row.number)


def _located(value: Any, root: Path) -> Any:
    """Return messages with the pictures of their parts as whole paths; raise `RowFault`."""
    if isinstance(value, list):
        return [_located(one, root) for one in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") not in PICTURE_PARTS:
        return {name: _located(one, root) for name, one in value.items()}
    shown = next((value[name] for name in ("image", "path", "url", "image_url") if value.get(name)), None)
    shown = shown["url"] if isinstance(shown, dict) and "url" in shown else shown
    return {"type": "image"} | ({} if shown is None else {"image": _located_picture(shown, root)})


def _located_picture(value: Any, root: Path) -> str:
    """Return a picture's path below the table's folder, or its data URL; raise `RowFault` for any other."""
    if isinstance(value, str) and value[:5].lower() == "data:":
        return value
    place = _file({"picture": value}, "picture", root)
    if isinstance(place, str):
        raise RowFault(place)
    return str(place)


def hold_out(
    listing: Listing, share: float | None, seed: int, *, every_class: bool = False
) -> tuple[Listing, Listing]:
    """Return what is trained on and what is held out, `share` of the items of all folders and tables together.

    With `every_class` the last item of a class is trained on.
    """
    count, held = len(listing.items), set[int]()
    wanted = 0 if share is None else held_rows(count, share)
    left = Counter(item.target for item in listing.items)
    for number in drawing_order(count, seed) if wanted else ():
        target = listing.items[number].target
        if len(held) < wanted and (not every_class or left[target] > 1):
            left[target] -= 1
            held.add(number)
    trained_on, held_out, first = Listing(), Listing(), 0
    for source, items in listing.by_source():
        own = [first + place in held for place in range(len(items))]
        first += len(items)
        trained_on.items += [item for item, out in zip(items, own, strict=True) if not out]
        trained_on.reports[source] = replace(listing.reports[source], documents=own.count(False))
        if any(own):
            held_out.items += [item for item, out in zip(items, own, strict=True) if out]
            held_out.reports[source] = FileReport(rows=own.count(True), documents=own.count(True))
    return trained_on, held_out


def refuse(report: FileReport, item: Item, reason: str) -> None:
    """Count an item as broken, whose file or target shows it."""
    report.refuse(item.number, reason)
    report.documents -= 1


def _sources(patterns: Sequence[str], folder: Path) -> list[Path]:
    found: list[Path] = []
    for pattern in patterns:
        path = folder / pattern
        found += [path] if path.is_dir() else expand([pattern], folder)
    return found


def _kept(path: Path, items: Iterable[Item], report: FileReport, strict: bool) -> list[Item]:
    found = list(items)
    report.documents = len(found)
    if strict and report.broken:
        number, reason = report.listed[0]
        raise DataError(
            f"row {number} of {path} is broken", found=reason, next="mend it, or set data.strict = false"
        )
    if not found:
        reasons = "; ".join(f"{number}: {reason}" for number, reason in report.listed[:3])
        raise DataError(
            f"{path} holds nothing to train on",
            found=f"{report.rows:,} rows, {report.broken:,} broken" + (f" ({reasons})" if reasons else ""),
            allowed="a folder with a subfolder of pictures for each class, or a table that names files",
        )
    return found


def _metadata(path: Path) -> Path | None:
    """Return the table of a folder that `datasets` calls an image folder or an audio folder."""
    return next((path / name for name in METADATA if (path / name).is_file()), None)


def _named(values: dict[str, Any], column: str) -> str:
    """Return the column, or what published data sets call it where a row does not have it."""
    if column in values:
        return column
    return next((name for name in SYNONYMS.get(column, ()) if name in values), column)


def _classes(folder: Path, report: FileReport) -> Iterator[Item]:
    """The pictures below each subfolder, whose name is their class."""
    for place in sorted(folder.iterdir()):
        if place.name.startswith("."):
            continue
        for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if path.is_dir() or path.name.startswith("."):
                continue
            report.rows += 1
            if not place.is_dir():
                report.refuse(report.rows, f"{path.name} lies in no class's subfolder")
            elif path.suffix.lower() not in SUFFIXES:
                report.refuse(report.rows, f"{path.relative_to(folder)} is no picture by its name")
            else:
                yield Item(path=path, target=place.name, number=report.rows)


def _table(
    path: Path,
    report: FileReport,
    file: str,
    target: str,
    types: tuple[type, ...],
    language: str | None = None,
) -> Iterator[Item]:
    """Yield the items of a table: column `file` names or holds a file, `target` what is learnt, of one of `types`."""
    root = path.resolve().parent if not path.is_dir() else path.resolve()
    asked_file, asked_target = file, target
    for row in _rows(path):
        report.rows += 1
        values = dict(row.values)
        file, target = _named(values, asked_file), _named(values, asked_target)
        if isinstance(values.get(target), float) and values[target].is_integer():
            values[target] = int(values[target])  # a column of classes with gaps becomes floats
        place = row.fault or _file(values, file, root)
        fault = place if isinstance(place, str) else _fault(values, target, types)
        spoken = values.get(language) if language else None
        if fault is None and spoken is not None and not isinstance(spoken, str):
            fault = f"'{language}' is no text, but {type(spoken).__name__}"
        if fault is not None or isinstance(place, str):
            report.refuse(row.number, fault or str(place))
            continue
        if types == (str,) and not values[target].strip():
            report.empty += 1
            continue
        yield Item(path=place, target=values[target], number=row.number, language=spoken or None)


def _file(values: dict[str, Any], column: str, root: Path) -> Path | str:
    """Return the file that a row names below `root` or holds, or the reason for a missing one.

    `datasets` writes pictures and sounds as `{bytes, path}`; bytes are kept in the user's cache folder.
    """
    held = values.get(column)
    if isinstance(held, dict):
        if isinstance(held.get("bytes"), bytes):
            return _kept_bytes(held["bytes"], str(held.get("path") or ""))
        values = {column: held.get("path")}
    if fault := _fault(values, column, (str,)):
        return fault
    place = Path(os.path.normpath(root / values[column]))
    return place if root in place.parents else f"'{values[column]}' lies outside of the table's folder"


def _kept_bytes(content: bytes, name: str) -> Path:
    """Write a file's content under its digest, once."""
    folder = private_cache(CACHE)
    place = folder / f"{hashlib.sha256(content).hexdigest()[:32]}{Path(name).suffix[:8]}"
    if not place.is_file():
        with replacing(place) as new:
            new.write_bytes(content)
    return place


def _fault(values: dict[str, Any], column: str, types: tuple[type, ...]) -> str | None:
    value = values.get(column)
    if column not in values:
        return f"no column '{column}' (there are {', '.join(map(repr, values)) or 'none'})"
    if isinstance(value, bool) or not isinstance(value, types):
        return f"'{column}' is {type(value).__name__}, not {' or '.join(kind.__name__ for kind in types)}"
    if isinstance(value, str) and "\0" in value:
        return f"'{column}' holds a NUL"
    return None


def _rows(path: Path) -> Iterator[DataRow]:
    if is_rows(path):
        return read_rows(path)
    raise DataError(
        f"{path} is neither a folder nor a table", allowed=", ".join(f"*{form}" for form in READERS)
    )
