"""The model on its devices, and the micro-batches of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh

from torchwright.train.data.batch import WindowBatch
from torchwright.train.model import Transformer, check_shapes, explicit_attention, load_weights
from torchwright.train.model.classifier import reset_scores
from torchwright.train.model.foreign import Foreign, ForeignConfig, ModelConfig, build_foreign
from torchwright.train.model.lora import reset_adapters
from torchwright.train.model.transformer import SCORE
from torchwright.train.parallel import make_mesh, parallelize
from torchwright.train.parallel.batch import own_part_of_rows, own_tokens
from torchwright.train.parallel.foreign import shard_foreign
from torchwright.train.parallel.pipeline import owners
from torchwright.train.parallel.stages import Staged
from torchwright.train.run.config.data_section import RunError
from torchwright.train.run.config.run import Run
from torchwright.train.run.config.schedule import ScheduledStep
from torchwright.train.run.objectives.adapt import adapt
from torchwright.train.run.objectives.balancing import balanced
from torchwright.train.run.objectives.heads import decoder_of
from torchwright.train.run.objectives.objective import MicroBatch
from torchwright.train.run.objectives.precision import check_even, convert
from torchwright.train.run.objectives.step import compile_blocks, recompute


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
    if run.model.folder is not None:
        check_shapes(model, folder / run.model.folder)
    convert(model, run.precision, device, layout.tp, gather=run.gather)
    if run.qat is not None:
        from torchwright.train.run.objectives.qat import fake_quantize

        fake_quantize(model, run.qat)
    if run.lora is not None:
        adapt(model, run.lora, run.precision)
    if device == "cpu":
        # The fused operator's backward pass is slow on CPUs.
        model.use_attention(explicit_attention)
    recompute(model, run.recompute)
    # QAT rounds the weights that are written, which are float32.
    whole = run.precision == "fp32" or run.qat is not None
    dispatch = "all_to_all" if run.experts is None else run.experts.dispatch
    parallelize(model, layout, mesh, compute=None if whole else torch.bfloat16, dispatch=dispatch)
    if run.gather is not None:
        check_even(model)
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
    shard_foreign(model, model.layers, run.parallel, mesh)
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
        """Return how many of the step's rows are this process's."""
        return rows // self._layout.batch_ways

    def of_step(self, step: ScheduledStep, windows: Source) -> list[MicroBatch]:
        """Return the part of a step's rows that this process reads, in order."""
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
