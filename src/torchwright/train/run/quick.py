"""A run file made from a model and its data: what `torchwright train --model DIR --data FILE` trains by.

Sizes follow from the tokens that there are and the processes that were started; every choice stands in the file, which
is written into the run's folder.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchwright.hub.folder import read_config, resolve
from torchwright.hub.tokenizer import find_tokenizer
from torchwright.train.data.rows import is_dataset
from torchwright.train.data.text import SHARD_SUFFIXES
from torchwright.train.run.config import Lora
from torchwright.train.run.data_section import RunError, Section
from torchwright.train.run.objective_section import Preference

SAMPLE_BYTES = 1 << 20
"""Text by which the tokens of all of it are estimated."""
CONTEXT, ROWS = 1024, 16
"""The longest window, and windows of a step, where there are data enough."""
BESIDE = ("", ".json")
"""Files beside data: notes, checksums."""
STEPS = 50
"""Steps of an epoch at least, while a step has more than one window."""
MANY_TOKENS = 10_000_000
"""Data that is read once; less is read `EPOCHS` times."""
EPOCHS = 3
RATES = {"full": 2e-5, "lora": 2e-4}
"""Peak learning rates for models of `LARGE` parameters or more; smaller ones take `SMALLER` times as much."""
DPO_RATES = {"full": 1e-6, "lora": 1e-5}
"""The same for preferences, of which a step says more about a whole answer."""
LARGE, SMALLER = 1_000_000_000, 5.0


def quick_run(
    model: str,
    data: Sequence[str],
    *,
    lora: str | None = None,
    dpo: str | None = None,
    chat: bool = False,
    merge: bool = False,
    world: int = 1,
) -> dict[str, Any]:
    """The values of a run file that lies in the run's own folder. Raises `RunError` for what cannot be read.

    `lora` and `dpo` are `read_fields`' of [lora] and [preference]; `world` is how many processes share the model and
    the batch.
    """
    folder = resolve(model).resolve()
    config = read_config(folder)
    train = [pattern for path in data for pattern in _patterns(Path(path))]
    tokens = _tokens(train, folder)
    longest = config.get("max_position_embeddings") or config.get("n_positions") or CONTEXT
    # A pair is not cut: windows are as long as they may be.
    wanted = CONTEXT if dpo is not None else max(32, tokens // STEPS)
    context = _power_of_two(min(CONTEXT, int(longest), wanted))
    rows = world * max(1, min(ROWS // world, _power_of_two(max(1, tokens // context // STEPS // world))))
    step = rows * context
    total = step * max(1, round(tokens * (1 if tokens >= MANY_TOKENS else EPOCHS) / step))
    small = _parameters(folder) < LARGE
    rates = RATES if dpo is None else DPO_RATES
    rate = rates["full" if lora is None else "lora"] * (SMALLER if small else 1)
    values: dict[str, Any] = {
        "out": ".",
        "tokens": total,
        "batch_tokens": step,
        "context": context,
        "micro_batches": max(1, rows // world // 4),
        "log_every": max(1, min(10, total // step // 10)),
        "model": {"folder": str(folder)},
        "data": {"train": train, **({"form": "chat"} if chat else {})},
        "optimizer": {"lr": rate, "weight_decay": 0.0},
        "schedule": {"warmup_tokens": total // 30, "final": 0.1},
        "checkpoint": {"every_steps": max(10, min(200, total // step // 10))},
    }
    if world > 1:
        values["layout"] = {"dp_shard": world}
    if lora is not None:
        values["lora"] = (
            {"r": Lora().r} | read_fields("--lora", lora, Lora) | ({"merge": True} if merge else {})
        )
    elif merge:
        raise RunError("--merge puts adapters into a model", next="give --lora as well, or leave --merge out")
    if dpo is not None:
        values["preference"] = {"loss": Preference().loss} | read_fields("--dpo", dpo, Preference)
    return values


def read_fields(option: str, text: str, section: type[Section]) -> dict[str, Any]:
    """`r=16,alpha=32,targets=q_proj+v_proj,dora=true` as the fields of a section; empty text is none.

    Names and values are checked with the rest of the run. Raises `RunError` for a word that is no `name=value`.
    """
    found: dict[str, Any] = {}
    for word in filter(None, text.split(",")):
        name, equals, value = word.partition("=")
        if not equals:
            raise RunError(
                f"{option} takes name=value, not '{word}'", allowed=", ".join(section.model_fields)
            )
        if name == "targets":
            found[name] = value.split("+")
        else:
            try:
                found[name] = json.loads(value)
            except ValueError:
                found[name] = value
    return found


def to_toml(values: dict[str, Any], prefix: str = "") -> str:
    """Numbers, truth values, text, lists of text and tables of them as TOML."""
    lines = [f"{name} = {json.dumps(value)}" for name, value in values.items() if not isinstance(value, dict)]
    for name, value in values.items():
        if isinstance(value, dict):
            lines += ["", f"[{prefix}{name}]", to_toml(value, f"{prefix}{name}.")]
    return "\n".join(lines)


def _patterns(path: Path) -> list[str]:
    """A file or a folder that `datasets` saved, or a glob for each kind of file in a folder."""
    path = path.resolve()
    if not path.is_dir() or is_dataset(path):
        return [str(path)]
    kinds = sorted({file.suffix for file in path.iterdir() if file.is_file() and file.suffix not in BESIDE})
    if not kinds:
        raise RunError(f"--data: the folder {path} holds no files of data")
    return [str(path / f"*{kind}") for kind in kinds]


def _tokens(patterns: Sequence[str], folder: Path) -> int:
    """About how many tokens the files hold."""
    files = [file for pattern in patterns for file in _files(Path(pattern))]
    if not files:
        raise RunError(f"--data: there is no file {patterns[0]}")
    shards = [file for file in files if file.suffix in SHARD_SUFFIXES]
    bytes_of_rest = sum(file.stat().st_size for file in files if file not in shards)
    texts = [file for file in files if file not in shards]
    held = sum(file.stat().st_size // 2 for file in shards)
    return held + (round(bytes_of_rest * _tokens_per_byte(texts[0], folder)) if texts else 0)


def _files(path: Path) -> list[Path]:
    found = path.rglob("*") if path.is_dir() else path.parent.glob(path.name)
    return sorted(file for file in found if file.is_file())


def _tokens_per_byte(file: Path, folder: Path) -> float:
    """Of a file's beginning; a guess where it is no text."""
    tokenizer = find_tokenizer(folder)
    if tokenizer is None:
        raise RunError(f"{folder} has no tokenizer.json to read text with", next="give token shards (*.npy)")
    with file.open("rb") as opened:
        sample = opened.read(SAMPLE_BYTES)
    try:
        text = sample.decode()
    except UnicodeDecodeError as error:
        if len(sample) - error.start > 4:  # not just a character that the sample's end has cut
            return 0.25
        text = sample[: error.start].decode()
    return len(tokenizer.encode(text, add_special_tokens=False).ids) / max(1, len(sample))


def _parameters(folder: Path) -> int:
    """About how many a folder's model has, by its files in 16 bits."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) // 2


def _power_of_two(number: int) -> int:
    """The largest one that is not more."""
    return 1 << (number.bit_length() - 1)
