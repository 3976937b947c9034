"""What a run is built from: the process group, the model's folder, the model on its devices, the data."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchwright.decoder.families import decoder_config
from torchwright.errors import TorchwrightError, first_line
from torchwright.hub.chat_template import TEMPLATES
from torchwright.hub.run_folder import SOURCE
from torchwright.stuck.watch import turn_on
from torchwright.train.data.batch import WindowBatch
from torchwright.train.model import Transformer, explicit_attention, load_weights
from torchwright.train.model.classifier import reset_scores
from torchwright.train.model.foreign import (
    Foreign,
    ForeignConfig,
    ModelConfig,
    build_foreign,
    read_model_config,
)
from torchwright.train.model.lora import reset_adapters
from torchwright.train.model.transformer import SCORE
from torchwright.train.parallel import make_mesh, parallelize
from torchwright.train.parallel.batch import own_part_of_rows, own_tokens
from torchwright.train.parallel.foreign import shard_foreign
from torchwright.train.parallel.pipeline import owners
from torchwright.train.parallel.stages import Staged
from torchwright.train.run import torchrun
from torchwright.train.run.adapt import adapt
from torchwright.train.run.balancing import balanced
from torchwright.train.run.config import Run, RunFile
from torchwright.train.run.data_section import RunError
from torchwright.train.run.heads import decoder_of
from torchwright.train.run.objective import MicroBatch
from torchwright.train.run.precision import convert
from torchwright.train.run.run_file import changed_fields
from torchwright.train.run.schedule import ScheduledStep
from torchwright.train.run.step import compile_blocks, recompute

T = TypeVar("T")
CONFIG = "config.json"
COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "LICENSE.txt",
    *TEMPLATES,
)


@dataclass(frozen=True, kw_only=True)
class Place:
    """This process among those of the run, and the device it computes on."""

    rank: int
    world: int
    device: str
    """cpu or cuda."""

    @property
    def first(self) -> bool:
        """Whether it speaks for all."""
        return self.rank == 0


@contextmanager
def processes(timeout_s: float) -> Generator[Place]:
    """Join the processes that torchrun started, or be the only one; leave them at the end.

    One process has a group too, so that everything below is the same for one and for many.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    joined = not dist.is_initialized()
    with _infrastructure():
        if joined:
            _join(device, timeout_s)
        try:
            yield Place(rank=dist.get_rank(), world=dist.get_world_size(), device=device)
        finally:
            if joined and dist.is_initialized():
                dist.destroy_process_group()


def _join(device: str, timeout_s: float) -> None:
    timeout = timedelta(seconds=timeout_s)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    try:
        if torchrun.started() is not None:
            turn_on()
            store, rank, world = next(dist.rendezvous("env://", timeout=timeout))  # pyright: ignore[reportPrivateImportUsage]
            # torchrun keeps its store when it starts all again: without a name of its own a start would find the
            # addresses of the processes before.
            store = dist.PrefixStore(f"start-{torchrun.restarts()}", store)  # pyright: ignore[reportPrivateImportUsage]
        else:
            store, rank, world = dist.HashStore(), 0, 1  # pyright: ignore[reportPrivateImportUsage]
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    except ValueError as error:  # of a variable that is missing or no number
        raise RunError(
            "the processes cannot meet", found=str(error), next="start them with torchrun"
        ) from error


@contextmanager
def _infrastructure() -> Generator[None]:
    """Raise `RunError` for what the network or another process did, which is no fault of the program."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error).lower():
            raise
        raise RunError(
            "the processes of the run cannot reach each other",
            found=first_line(error),
            next="see what the others said, and whether MASTER_ADDR and MASTER_PORT can be reached from each; "
            "then start all again",
        ) from error


def check_alike(run: RunFile) -> None:
    """Raise `RunError` on every process unless all have the same run; it names process and field."""
    runs: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(runs, run.model_dump(mode="json"))
    for rank, other in enumerate(runs):
        different = changed_fields(runs[0], other)
        if different:
            raise RunError(
                f"the processes have different run files: process {rank} is not like process 0",
                found="; ".join(different),
                next="start every process with the same RUN.toml",
            )


def on_first(function: Callable[[], T]) -> T:
    """What `function` gives on the first process, on every process; what a user can mend is raised on all."""
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = function()
        except (TorchwrightError, OSError) as error:
            answer[1] = error
    dist.broadcast_object_list(answer)
    if answer[1] is not None:
        raise answer[1]
    return answer[0]


def write_source(run: Run, folder: Path, out: Path) -> Path:
    """RUN/source: config.json and the tokenizer's files, by which the trained weights can be loaded.

    Raises `RunError` where the folder has those of another model than the run file's, and `RunError` or `ModelError`
    for a configuration that is missing or that no family describes.
    """
    source, files = out / SOURCE, _source_files(run, folder)
    if source.is_dir():
        _check_source(source, files)
        return source
    new = source.with_name(f".{SOURCE}.{os.getpid()}")
    new.mkdir(parents=True)
    try:
        for name, content in files.items():
            (new / name).write_bytes(content)
        new.rename(source)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return source


def _source_files(run: Run, folder: Path) -> dict[str, bytes]:
    """Name → content of the files that RUN/source is to hold."""
    if run.model.config is not None:
        content = json.dumps(run.model.config, indent=2).encode()
        decoder_config(run.model.config, "`model.config` of the run file")
    else:
        assert run.model.folder is not None
        model = folder / run.model.folder
        if not (model / CONFIG).is_file():
            raise RunError(f"model.folder has no {CONFIG}: {model}", next="check `model` in the run file")
        content = (model / CONFIG).read_bytes()
        read_model_config(model)
    tokenizer = run.model.tokenizer or run.model.folder
    copied = [folder / tokenizer / name for name in COPIED] if tokenizer else []
    return {CONFIG: content, **{path.name: path.read_bytes() for path in copied if path.is_file()}}


def _check_source(source: Path, files: dict[str, bytes]) -> None:
    """Raise `RunError`, naming what differs, unless RUN/source holds these files."""
    held = {path.name: path.read_bytes() for path in source.iterdir()}
    different = [
        f"model.{field}"
        for field in changed_fields(*(json.loads(which.get(CONFIG, "{}")) for which in (held, files)))
    ]
    different += [
        f"{name} of the tokenizer"
        for name in sorted({*held, *files} - {CONFIG})
        if held.get(name) != files.get(name)
        # Runs that were begun before training rendered chats have none.
        and not (name in TEMPLATES and name not in held)
    ]
    if different:
        raise RunError(
            f"the run folder {source.parent} was begun with another model than the run file's",
            found="; ".join(different),
            next="set the old values, or another `out`; where nothing in the folder is wanted, remove it",
        )


def build_model(
    run: Run, config: ModelConfig, folder: Path, device: str
) -> tuple[Transformer | Foreign, DeviceMesh]:
    """The model with its precision, recomputation and layout, its weights in place, and the mesh it lies on.

    Weights are made after the layout is applied, so that no process ever holds them all.
    """
    layout = run.parallel
    mesh = make_mesh(layout, device)
    if isinstance(config, ForeignConfig):
        return _build_foreign(run, config, folder, mesh, device), mesh
    if run.experts is not None:
        config = balanced(config, run.experts)
    with torch.device("meta"):
        if layout.pp > 1:
            turns = owners(run.pipeline.schedule, layout.pp, run.pipeline.stages)
            model = Staged(config, turns, mesh["pp"], layout.tp)
        else:
            model = decoder_of(run, config, folder)
    convert(model, run.precision, device, layout.tp)
    if run.qat is not None:
        from torchwright.train.run.qat import fake_quantize

        fake_quantize(model, run.qat)
    if run.lora is not None:
        adapt(model, run.lora, run.precision)
    if device == "cpu":
        # The fused operator's backward pass is slow on CPUs.
        model.use_attention(explicit_attention)
    recompute(model, run.recompute)
    # QAT rounds the weights that are written, which are float32.
    whole = run.precision == "fp32" or run.qat is not None
    parallelize(model, layout, mesh, compute=None if whole else torch.bfloat16)
    model.to_empty(device=device)
    model.tie()
    if run.model.folder is not None:
        load_weights(model, folder / run.model.folder)
    else:
        model.reset_parameters(run.seed)
    if run.lora is not None:
        reset_adapters(model, run.seed)
    if model.output == SCORE:
        reset_scores(model, run.seed)
    if run.compile:
        compile_blocks(model)
    return model, mesh


def _build_foreign(run: Run, config: ForeignConfig, folder: Path, mesh: DeviceMesh, device: str) -> Foreign:
    check_foreign(run, config)
    assert run.model.folder is not None
    model = build_foreign(folder / run.model.folder, device)
    if run.lora is not None:
        adapt(model, run.lora, run.precision)
        model.to(device)
        reset_adapters(model, run.seed)
    recompute(model, run.recompute)
    shard_foreign(model, run.parallel, mesh)
    return model


def check_foreign(run: Run, config: ForeignConfig) -> None:
    """Raise `RunError` for what a model of transformers' own code does not do here."""
    layout = run.parallel
    refused = [
        ("model.config", run.model.folder is None, "weights to begin with: set model.folder"),
        ("layout", layout.pp * layout.cp * layout.tp * layout.ep > 1, "dp_replicate and dp_shard"),
        ("precision", run.precision not in ("fp32", "bf16"), "fp32, bf16"),
        ("qat", run.qat is not None, "no [qat]"),
        ("preference", run.preference is not None, "no [preference]"),
        ("head", run.head is not None, "no [head]"),
        ("compile", run.compile, "compile = false"),
        ("experts", run.experts is not None, "no [experts]"),
        ("optimizer", run.optimizer.name == "muon", "any other"),
        (
            "context",
            config.context is not None and max(run.context, run.schedule.decay_context or 0) > config.context,
            f"at most {config.context} tokens, which its positions reach",
        ),
    ]
    for field, asked, allowed in refused:
        if asked:
            raise RunError(
                f"{config.architecture} trains by transformers' own code, which does not go with this `{field}`",
                allowed=allowed,
                next="change the run file; the families of docs/decoder.md take all of it",
            )


class Source(Protocol):
    """Numbered windows of tokens, as `Windows`."""

    def batch(self, first: int, rows: int) -> WindowBatch: ...


class Batches:
    """The rows of a step that this process computes, in micro-batches."""

    def __init__(self, run: Run, mesh: DeviceMesh, device: str) -> None:
        layout = run.parallel
        self._device, self._micro_batches = device, run.micro_batches
        self._layout, self._mesh = layout, mesh
        self.part = own_part_of_rows(layout, mesh)

    def rows(self, rows: int) -> int:
        """How many of the step's rows are this process's."""
        return rows // self._layout.batch_ways

    def of_step(self, step: ScheduledStep, windows: Source) -> list[MicroBatch]:
        """What this process reads in a step: its part of the rows, in order."""
        rows = self.rows(step.rows)
        first, micro = step.first + self.part * rows, rows // self._micro_batches
        return [
            self.prepare(windows.batch(first + number * micro, micro))
            for number in range(self._micro_batches)
        ]

    def prepare(self, windows: WindowBatch) -> MicroBatch:
        """This process's tokens (B, T / cp) of whole windows, with their positions."""
        ids_BT, labels_BT = windows.ids_BT.to(self._device), windows.labels_BT.to(self._device)
        own_T = own_tokens(ids_BT.shape[1], self._layout, self._mesh).to(self._device)
        positions, documents_BT = own_T if self._layout.cp > 1 else None, None
        if windows.documents_BT is not None:
            documents_BT = windows.documents_BT.to(self._device)
            positions = own_T - documents_BT[:, own_T]
        return MicroBatch(
            ids_BT=ids_BT[:, own_T],
            labels_BT=labels_BT[:, own_T],
            positions_BT=positions,
            documents_BS=documents_BT,
            reference_BT=None if windows.reference_BT is None else windows.reference_BT.to(self._device),
        )
