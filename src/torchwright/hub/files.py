"""The tensors of a folder's safetensors files, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from torchwright.core.errors import ModelError
from torchwright.core.regular_file import check_regular
from torchwright.hub.folder import read_object

LONGEST_NAME = 255
"""Bytes of one part of a path, on every file system that is in use."""
INDEX = "model.safetensors.index.json"
TOGETHER = "check that config.json and the *.safetensors belong together"


class TensorFiles:
    """The tensors of a folder's safetensors files, by name, memory-mapped.

    Raises `ModelError`, naming the file, for a shard that is missing, cut short or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[Path, Any] = {}
        self._files = self._index()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def names(self) -> list[str]:
        return list(self._files)

    def get(self, name: str) -> torch.Tensor:
        """The tensor as it lies in the file; copy it before `close`, which lets go of the file's memory."""
        path = self.path(name)
        try:
            return self._file(path).get_tensor(name)
        except SafetensorError as error:
            raise damaged(path, f"'{name}': {error}") from error

    def path(self, name: str) -> Path:
        """Return the file that holds a tensor; raises `ModelError` for an unknown tensor."""
        path = self._files.get(name)
        if path is None:
            raise ModelError(
                f"the weights in {self.folder} lack the tensor '{name}'",
                found=f"{len(self._files)} tensors in {len(set(self._files.values()))} files",
                next=TOGETHER,
            )
        return path

    def metadata(self) -> dict[str, str]:
        """Return the metadata of all files' headers together."""
        found: dict[str, str] = {}
        for path in dict.fromkeys(self._files.values()):
            found |= self._file(path).metadata() or {}
        return found

    def close(self) -> None:
        """Unmap all files; they open again when they are read."""
        self._open.clear()

    def _index(self) -> dict[str, Path]:
        index = self.folder / INDEX
        if index.is_file():
            names = read_object(index).get("weight_map")
            if not isinstance(names, dict):
                raise damaged(index, "no 'weight_map' from tensors to files")
            for file in dict.fromkeys(map(str, names.values())):
                _check_name(index, file)
            return {name: self.folder / str(file) for name, file in names.items()}
        files = [self.folder / "model.safetensors"]
        if not files[0].exists():
            files = sorted(self.folder.glob("*.safetensors"))
        if not files:
            raise ModelError(
                f"{self.folder} has no *.safetensors",
                found=", ".join(sorted(p.name for p in self.folder.iterdir())[:6]),
                next="convert the weights to safetensors with transformers' save_pretrained",
            )
        return {name: path for path in files for name in self._file(path).keys()}  # noqa: SIM118

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            try:
                check_regular(path.stat().st_mode)
                self._open[path] = safe_open(path, framework="pt")
            except FileNotFoundError as error:
                raise ModelError(
                    f"{path} is not there",
                    found=f"{INDEX} names it",
                    next="fetch the model again; a download may have stopped half way",
                ) from error
            except (SafetensorError, OSError, ValueError) as error:
                raise damaged(path, str(error)) from error
        return self._open[path]


def _check_name(index: Path, file: str) -> None:
    """Refuse a file name of an index that leads out of the folder or that no file system takes."""
    path = Path(file)
    if path.is_absolute() or ".." in path.parts:
        raise damaged(index, f"it names the file {file[:200]!r} outside of the folder")
    if "\0" in file or any(len(part.encode("utf-8", "surrogatepass")) > LONGEST_NAME for part in path.parts):
        raise damaged(
            index, f"it names a file by {len(file):,} characters that are no file name: {file[:100]!r}"
        )


def damaged(path: Path, reason: str) -> ModelError:
    return ModelError(
        f"{path} cannot be read",
        found=reason.strip(),
        next="fetch the file again; a download may have stopped half way",
    )
