"""torchwright.json: the rounding for which a folder's weights were trained. No torch here.

`[qat]` of a training run writes it, `serve` and `generate` follow it where no `--quantize` is given.
"""

from __future__ import annotations

import json
from pathlib import Path

from torchwright.core.errors import ModelError, TorchwrightError
from torchwright.core.scheme import Scheme, read_scheme
from torchwright.hub.folder import read_object

FILE = "torchwright.json"
FORMAT = 1


def write_trained_scheme(folder: Path, scheme: Scheme) -> None:
    """Say in the folder that its weights were trained with this rounding."""
    record = {"format": FORMAT, "quantize": str(scheme)}
    (folder / FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def trained_scheme(folder: Path) -> str | None:
    """The scheme as `--quantize` takes it, None where the folder names none.

    Raises `ModelError`, naming the file, for one that says anything else.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    record = read_object(path)
    quantize = record.get("quantize")
    try:
        known = record.keys() == {"format", "quantize"} and record["format"] == FORMAT
        if not known or not isinstance(quantize, str) or read_scheme(quantize) is None:
            raise ModelError("no scheme of this version")
    except TorchwrightError as error:
        raise ModelError(
            f"{path} does not say what the weights were trained for",
            found=str(record)[:200],
            allowed=f'{{"format": {FORMAT}, "quantize": "w4a8:group_size=32"}}, as `torchwright train` writes it',
            next="name the rounding with --quantize, or none",
        ) from error
    return quantize
