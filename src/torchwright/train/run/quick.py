"""Make a run file from a model and its data: what `torchwright train --model DIR --data FILE` trains by.

Sizes follow from the tokens that the data hold once they are tokenized, from the processes and from the memory. Every
choice stands in the file with its reason, and the file is written into the run's folder.
"""

from __future__ import annotations

import glob
import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchwright.core.rows import is_dataset
from torchwright.hardware.devices import get_device
from torchwright.hub.folder import read_config, resolve
from torchwright.train.run.amount import Amount, measure
from torchwright.train.run.config.data_section import RunError, Section
from torchwright.train.run.config.objective_section import Preference
from torchwright.train.run.config.run import Lora
from torchwright.train.run.config.run_file import with_settings
from torchwright.train.run.runtime import torchrun

if TYPE_CHECKING:
    from torchwright.hardware.devices.base import Device

CONTEXT, LONGEST, ROWS = 1024, 2048, 16
"""The longest window of a stream and of documents, and windows of a step, where there are data enough."""
SHORTEST = 256
"""The least window of documents where the model has room: short ones are packed more tightly into it."""
BESIDE = ("", ".json")
"""Suffixes of files next to data: notes, checksums."""
STEPS = 50
"""Steps of an epoch at least, while a step has more than one window."""
EXAMPLES, FEW_STEPS = 8, 10
"""Documents of a step at least, while an epoch has this many steps: a gradient of one answer is mostly noise."""
MANY_TOKENS = 10_000_000
"""Data that is read once; less is read `EPOCHS` times."""
EPOCHS = 3
HOLD_OUT = 0.05
RATES = {"full": 2e-5, "lora": 2e-4}
"""Peak learning rates for models of `LARGE` parameters or more; smaller ones take `SMALLER` times as much."""
DPO_RATES = {"full": 1e-6, "lora": 1e-5}
"""The same for preferences, of which a step says more about a whole answer."""
LARGE, SMALLER = 1_000_000_000, 5.0
MICRO_ROWS = 4
"""Windows that are computed at once, where memory allows: more windows at once save no time."""


@dataclass(frozen=True, kw_only=True)
class QuickRun:
    """The values of a run file, and why they were chosen."""

    values: dict[str, Any]
    reasons: dict[str, str] = field(default_factory=dict)
    """Field, as `section.field` → its reason."""

    def written(self) -> str:
        """Return the file, with reasons as comments."""
        return to_toml(self.values, self.reasons) + "\n"


def quick_run(
    model: str,
    data: Sequence[str],
    *,
    lora: str | None = None,
    dpo: str | None = None,
    chat: bool = False,
    merge: bool = False,
    world: int = 1,
    epochs: float | None = None,
    no_validation: bool = False,
    settings: Mapping[str, Any] | None = None,
    cache: Path | None = None,
) -> QuickRun:
    """Return the run file of a run in its own folder. Raises `RunError` and `DataError` for what cannot be read.

    `lora` and `dpo` are `read_fields`' of [lora] and [preference]; `world` is how many processes share the model and
    the batch. `settings` are fields of the run file by their dotted names, which win over what is chosen here. Tokens
    are kept in `cache`, where there is one.
    """
    folder, asked = resolve(model).resolve(), dict(settings or {})
    config = read_config(folder)
    values: dict[str, Any] = {
        "out": ".",
        "model": {"folder": str(folder)},
        "data": {"train": [pattern for path in data for pattern in _patterns(Path(path))]},
    }
    if chat:
        values["data"]["form"] = "chat"
    if not no_validation and "data.validation" not in asked:
        values["data"]["hold_out"] = HOLD_OUT
    if lora is not None:
        values["lora"] = (
            {"r": Lora().r} | read_fields("--lora", lora, Lora) | ({"merge": True} if merge else {})
        )
    elif merge:
        raise RunError("--merge puts adapters into a model", next="give --lora as well, or leave --merge out")
    if dpo is not None:
        values["preference"] = {"loss": Preference().loss} | read_fields("--dpo", dpo, Preference)
    longest = int(config.get("max_position_embeddings") or config.get("n_positions") or CONTEXT)
    pair = int(asked.get("context", power_of_two(min(CONTEXT, longest))))
    with tempfile.TemporaryDirectory() if cache is None else nullcontext(cache) as place:
        amount = measure(with_settings(values, asked), pair, Path(place))
        sizes = _sizes(config, amount, longest, world, epochs, asked)
    small = _parameters(folder) < LARGE
    rates = RATES if dpo is None else DPO_RATES
    rate = rates["full" if lora is None else "lora"] * (SMALLER if small else 1)
    every = max(10, min(200, sizes.steps // 10))
    values |= sizes.fields | {
        "log_every": max(1, min(10, sizes.steps // 10)),
        "optimizer": {"lr": rate, "weight_decay": 0.0},
        "schedule": {"warmup_tokens": int(asked.get("tokens", sizes.fields["tokens"])) // 30, "final": 0.1},
        "checkpoint": {"every_steps": every},
    }
    reasons = dict(sizes.reasons)
    reasons["optimizer.lr"] = f"{'under' if small else 'over'} a billion parameters"
    reasons["schedule.warmup_tokens"] = "a thirtieth of the run"
    reasons["checkpoint.every_steps"] = "ten times a run, but every 10 to 200 steps"
    if amount.held is not None:
        values["evaluation"] = {"every_steps": every}
        reasons["evaluation.every_steps"] = "with each checkpoint, so that the best one is kept"
        reasons["data.hold_out"] = f"{amount.held}; --no-validation holds nothing out"
    elif values["data"].pop("hold_out", None):
        reasons["data.train"] = "too few to hold some out for validation"
    if world > 1:
        values["layout"] = {"dp_shard": world}
    choose_precision(values, reasons)
    return QuickRun(values=with_settings(values, asked), reasons=own_reasons(reasons, asked))


def own_reasons(reasons: Mapping[str, str], asked: Mapping[str, Any]) -> dict[str, str]:
    """Return the reasons without those of values that were asked for in place of the ones chosen here."""
    return {name: why for name, why in reasons.items() if name not in asked or why.endswith("as asked for")}


def choose_precision(values: dict[str, Any], reasons: dict[str, str]) -> None:
    """Train in float32 where this machine's bfloat16 is slower."""
    from torchwright.train.run.objectives.precision import slow_in_bf16

    if slow_in_bf16(get_device().name):
        values["precision"] = "fp32"
        reasons["precision"] = (
            "this processor has no instructions for bfloat16, which takes several times as long"
        )


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """Sizes and numbers of windows and steps."""

    fields: dict[str, int]
    reasons: dict[str, str]
    steps: int


def _sizes(
    config: Mapping[str, Any],
    amount: Amount,
    longest: int,
    world: int,
    epochs: float | None,
    asked: Mapping[str, Any],
) -> _Sizes:
    """Return window, batch and length of the run, by what it reads."""
    if "context" in asked:
        context, why = int(asked["context"]), "as asked for"
    else:
        context, why = _window(amount, longest)
    windows = amount.windows(context)
    rows = max(1, windows // STEPS // world)
    if amount.packed:
        together = -(-EXAMPLES * windows // max(1, amount.documents) // world)
        rows = max(rows, min(together, windows // FEW_STEPS // world))
    rows = world * power_of_two(max(1, min(ROWS // world, rows)))
    if "batch_tokens" in asked:
        rows = max(1, int(asked["batch_tokens"]) // context)
    if epochs is None:
        epochs, times = (1, "once") if amount.tokens >= MANY_TOKENS else (EPOCHS, f"{EPOCHS} times")
    else:
        times = ("once" if epochs == 1 else f"{epochs:g} times") + ", as asked for"
    steps = max(1, round(windows * epochs / rows))
    fitting = _windows_in_memory(config, context, get_device())
    at_once = power_of_two(max(1, min(MICRO_ROWS, rows // world, fitting)))
    return _Sizes(
        fields={
            "tokens": steps * rows * context,
            "batch_tokens": rows * context,
            "context": context,
            "micro_batches": max(1, rows // world // at_once),
        },
        reasons={
            "tokens": f"{steps:,} steps; {amount.tokens:,} tokens in {windows:,} windows are read {times}",
            "batch_tokens": _why_rows(rows, amount, windows, world, asked),
            "context": why,
            "micro_batches": f"{_windows(at_once)} at once; memory has room for about {fitting:,}",
        },
        steps=steps,
    )


def _why_rows(rows: int, amount: Amount, windows: int, world: int, asked: Mapping[str, Any]) -> str:
    """Return the reason for a step's number of windows."""
    words = f"{_windows(rows)} a step" + (f" for {world} processes" if world > 1 else "")
    if amount.packed:
        words += f", about {max(1, round(rows * amount.documents / windows)):,} documents"
    if "batch_tokens" in asked:
        return f"{words}, as asked for"
    if rows >= ROWS:
        return f"{words}, the most without --set batch_tokens"
    steps = FEW_STEPS if amount.packed else STEPS
    return f"{words}: " + (
        "the least" if windows // rows < steps else f"the most with {steps} steps an epoch"
    )


def _windows(count: int) -> str:
    return f"{count:,} window{'s' if count != 1 else ''}"


def _window(amount: Amount, longest: int) -> tuple[int, str]:
    """Return the length of a window, and its reason; the model's positions reach `longest`."""
    if amount.pairs:
        return power_of_two(min(CONTEXT, longest)), "a pair is not cut: windows are as long as they may be"
    if amount.packed:
        wanted = max(SHORTEST, 1 << (amount.longest - 1).bit_length())
        why = f"the longest of {amount.documents:,} documents has {amount.longest + 1:,} tokens"
        return power_of_two(min(LONGEST, longest, wanted)), why
    context = power_of_two(min(CONTEXT, longest, max(32, amount.tokens // STEPS)))
    return context, f"{amount.tokens:,} tokens" + (f", {STEPS} windows at least" if context < CONTEXT else "")


def _windows_in_memory(config: Mapping[str, Any], context: int, device: Device) -> int:
    """Return about how many windows' activations fit into a quarter of the memory that is left on a device.

    A token has its logits and their gradient in float32, and in each layer some 30 values of the model's size. The
    processes that torchrun started on this machine share its memory; each of them has a card of its own.
    """
    free = device.free_memory_bytes() // (torchrun.on_this_machine() if device.name == "cpu" else 1)
    vocabulary, model = int(config.get("vocab_size") or 32_000), int(config.get("hidden_size") or 1024)
    token = 12 * vocabulary + 60 * model * int(config.get("num_hidden_layers") or 24)
    return max(1, free // 4 // (context * token))


def read_fields(option: str, text: str, section: type[Section]) -> dict[str, Any]:
    """`r=16,alpha=32,targets=q_proj+v_proj,dora=true` as the fields of a section; empty text has no fields.

    Names and values are checked with the rest of the run. Raises `RunError` for a word that is not `name=value`.
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


def to_toml(values: dict[str, Any], reasons: Mapping[str, str] | None = None, prefix: str = "") -> str:
    """Write numbers, truth values, text, lists of text and tables of them as TOML, reasons as comments."""
    lines = []
    for name, value in values.items():
        if not isinstance(value, dict):
            reason = (reasons or {}).get(f"{prefix}{name}")
            lines.append(f"{name} = {json.dumps(value)}" + (f"  # {reason}" if reason else ""))
    for name, value in values.items():
        if isinstance(value, dict):
            lines += ["", f"[{prefix}{name}]", to_toml(value, reasons, f"{prefix}{name}.")]
    return "\n".join(lines)


def _patterns(path: Path) -> list[str]:
    """Return a file or a folder that `datasets` saved, or a pattern for each kind of file in a folder."""
    path = path.resolve()
    if not path.exists() and not glob.has_magic(str(path)):
        raise RunError(f"--data: there is no file {path}")
    if not path.is_dir() or is_dataset(path):
        return [str(path)]
    files = [file for file in sorted(path.iterdir()) if file.is_file() and file.suffix]
    kinds = sorted({file.suffix for file in files if file.suffix not in BESIDE})
    if not kinds:  # a folder of JSON lists alone
        kinds = sorted({file.suffix for file in files})
    if not kinds:
        raise RunError(f"--data: the folder {path} holds no files of data")
    return [f"{glob.escape(str(path))}/*{kind}" for kind in kinds]


def _parameters(folder: Path) -> int:
    """Return about how many a folder's model has, by its files in 16 bits."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) // 2


def power_of_two(number: int) -> int:
    """Return the largest power of two that is not more."""
    return 1 << (number.bit_length() - 1)
