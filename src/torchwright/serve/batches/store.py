"""The folder of files and batches: read by this user alone, written by one server, and found again by the next.

    FOLDER/lock           held by the server that uses the folder
    FOLDER/salt           makes digests of API keys this folder's own
    FOLDER/incoming/      uploads that have not ended; they go at the next start
    FOLDER/files/         ID.json and ID.data of each file
    FOLDER/batches/       ID.json of each batch; ID.output and ID.errors while it runs

A record is written as a whole, before its data take their place; a record without data does not count.
Methods may be called in threads, which wait for the disk in place of the server's loop.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from torchwright.core.errors import WorkloadError
from torchwright.core.paths import UnsafeFolder, private_folder
from torchwright.core.process.files import open_own, replacing
from torchwright.core.system import try_lock
from torchwright.serve.api_error import ApiError
from torchwright.serve.batches.records import Purpose, StoredBatch, StoredFile, now
from torchwright.serve.ids import new_id
from torchwright.serve.limits import Limits

Record = TypeVar("Record", StoredFile, StoredBatch)
FILENAME_CHARACTERS = 255
"""The longest file name of the usual disks."""


class Store:
    """The files and batches of one server. `close` it at the end."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        """Raises `WorkloadError` for a folder that others can write to, or that another server uses."""
        self._limits, self._counting = limits, threading.Lock()
        self._writing = threading.Lock()
        try:
            self._folder = private_folder(folder)
            self._inner = {name: self._folder / name for name in ("incoming", "files", "batches")}
            for path in self._inner.values():
                path.mkdir(mode=0o700, exist_ok=True)
                path.chmod(0o700)
            self._lock = open_own(self._folder / "lock", os.O_RDWR, 0o600)
        except UnsafeFolder as error:
            raise WorkloadError(
                f"--batches {folder} is not used: what clients send would be kept there",
                found=error.found,
                allowed="a folder of your own that nobody else can write to (mode 700)",
            ) from error
        except OSError as error:
            raise WorkloadError(f"--batches {folder} cannot be used", found=str(error)) from error
        if try_lock(self._lock) is False:
            os.close(self._lock)
            raise WorkloadError(
                f"--batches {folder} is used by another server", next="give each server a folder of its own"
            )
        self._salt = self._secret()
        for path in self._inner["incoming"].iterdir():
            path.unlink()
        files = self._read("files", StoredFile)
        self.files = {id: file for id, file in files.items() if self.path(file).is_file()}
        self.batches = self._read("batches", StoredBatch)
        self._remove_strays()
        self.bytes = sum(path.stat().st_size for path in self._data())
        """Bytes of all files, and of the results of batches that have not ended."""

    def close(self) -> None:
        os.close(self._lock)

    def owner(self, key: bytes | None) -> str:
        """Return the name under which a key's files and batches are kept."""
        return "" if key is None else hashlib.blake2b(key, key=self._salt, digest_size=16).hexdigest()

    # Files

    def file(self, id: str, owner: str) -> StoredFile:
        """Raises `ApiError` (404) for a file that is not there, or is another owner's, or has expired."""
        found = self.files.get(id)
        if found is None or found.owner != owner or found.expires <= now():
            raise ApiError(404, f"there is no file '{id}'", param="file_id", code="file_not_found")
        return found

    def path(self, file: StoredFile) -> Path:
        return self._inner["files"] / f"{file.id}.data"

    @contextlib.contextmanager
    def incoming(self) -> Iterator[Path]:
        """Yield the place of an upload, whose bytes count until the block ends; `add` takes the file from there.

        Raises `ApiError` (429) where there are too many files.
        """
        if len(self.files) >= self._limits.stored_files:
            raise ApiError(
                429,
                f"there are {len(self.files)} files, which is the most; delete some",
                code="too_many_files",
            )
        path = self._inner["incoming"] / secrets.token_hex(8)
        os.close(open_own(path, os.O_WRONLY, 0o600))
        try:
            yield path
        finally:
            if path.exists():
                self.release(path.stat().st_size)
                path.unlink()

    def hold(self, count: int) -> None:
        """Account for bytes before they are written; raises `ApiError` (413) for too many."""
        with self._counting:
            if self.bytes + count > self._limits.stored_bytes:
                raise ApiError(
                    413,
                    f"all files together have more than {self._limits.stored_bytes} bytes; delete some",
                    code="storage_full",
                )
            self.bytes += count

    def release(self, count: int) -> None:
        """Account for bytes that are gone."""
        with self._counting:
            self.bytes -= count

    def add(
        self,
        data: Path,
        owner: str,
        *,
        purpose: Purpose,
        filename: str,
        seconds: float,
        id: str | None = None,
    ) -> StoredFile:
        """Take a file, whose bytes were held, and keep it for `seconds`."""
        with data.open("rb") as file:
            os.fsync(file.fileno())  # a loss of power leaves no empty file under a name
        created = now()
        found = StoredFile(
            id=id or new_id("file-"),
            owner=owner,
            filename=filename[:FILENAME_CHARACTERS],
            purpose=purpose,
            bytes=data.stat().st_size,
            created=created,
            expires=created + seconds,
        )
        self._write("files", found)
        data.replace(self.path(found))
        self.files[found.id] = found
        return found

    def delete(self, file: StoredFile) -> None:
        """Raises `ApiError` (409) for the input of a batch that has not ended."""
        users = [b for b in list(self.batches.values()) if b.input_file_id == file.id and not b.ended]
        if users:
            raise ApiError(
                409,
                f"the batch '{users[0].id}' reads the file; cancel it first",
                param="file_id",
                code="file_in_use",
            )
        if self.files.pop(file.id, None) is not None:
            self._record("files", file.id).unlink(missing_ok=True)
            self.path(file).unlink(missing_ok=True)
            self.release(file.bytes)

    # Batches

    def batch(self, id: str, owner: str) -> StoredBatch:
        """Raises `ApiError` (404) for a batch that is not there, or is another owner's."""
        found = self.batches.get(id)
        if found is None or found.owner != owner:
            raise ApiError(404, f"there is no batch '{id}'", param="batch_id", code="batch_not_found")
        return found

    def keep(self, batch: StoredBatch) -> None:
        """Write a batch as it is now."""
        self._write("batches", batch)
        self.batches.setdefault(batch.id, batch)

    def results(self, batch: StoredBatch) -> tuple[Path, Path]:
        """Return the places of a running batch's answers and errors."""
        folder = self._inner["batches"]
        return folder / f"{batch.id}.output", folder / f"{batch.id}.errors"

    # Age

    def expire(self) -> None:
        """Remove files whose time has come, and batches that ended long ago or are too many."""
        current = now()
        for file in [file for file in list(self.files.values()) if file.expires <= current]:
            with contextlib.suppress(ApiError):  # a batch reads it
                self.delete(file)
        ended = sorted((b for b in list(self.batches.values()) if b.ended), key=lambda b: b.created)
        surplus = len(self.batches) - self._limits.stored_batches
        for place, batch in enumerate(ended):
            if (
                place < surplus
                or current - batch.at.get(batch.status, batch.created) > self._limits.stored_seconds
            ):
                self._record("batches", batch.id).unlink(missing_ok=True)
                del self.batches[batch.id]

    # The disk

    def _record(self, kind: str, id: str) -> Path:
        return self._inner[kind] / f"{id}.json"

    def _write(self, kind: str, record: StoredFile | StoredBatch) -> None:
        path = self._record(kind, record.id)
        with self._writing, replacing(path) as beside, beside.open("wb") as file:
            # With the lock held: the last one to write knows the most.
            file.write(msgspec.json.encode(record))
            file.flush()
            os.fsync(file.fileno())

    def _read(self, kind: str, form: type[Record]) -> dict[str, Record]:
        """Return the records in the order of their making. Raises `WorkloadError` for a damaged one."""
        found = list[Record]()
        for path in self._inner[kind].glob("[!.]*.json"):
            try:
                found.append(msgspec.json.decode(path.read_bytes(), type=form))
            except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise WorkloadError(
                    f"{path} cannot be read", found=str(error), next="move it away, and what belongs to it"
                ) from error
        return {record.id: record for record in sorted(found, key=lambda record: record.created)}

    def _remove_strays(self) -> None:
        """Remove what a killed server left of a record or its data."""
        for path in self._inner["files"].iterdir():
            if path.name.partition(".")[0] not in self.files:
                path.unlink()
        for path in self._inner["batches"].iterdir():
            batch = self.batches.get(path.name.partition(".")[0])
            if batch is None or (batch.ended and path.suffix != ".json"):
                path.unlink()

    def _data(self) -> Iterator[Path]:
        yield from self._inner["files"].glob("*.data")
        yield from self._inner["batches"].glob("*.output")
        yield from self._inner["batches"].glob("*.errors")

    def _secret(self) -> bytes:
        path = self._folder / "salt"
        if not path.is_file():
            with replacing(path) as beside:
                beside.chmod(0o600)
                beside.write_bytes(secrets.token_bytes(32))
        return path.read_bytes()
