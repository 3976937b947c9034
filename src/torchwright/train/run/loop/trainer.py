"""One process's part of a run: steps, what comes between them, and what is left at the end."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torchwright.core.scheme import scheme_of
from torchwright.hardware.devices import get_device
from torchwright.hardware.devices.base import Device
from torchwright.hub.run_folder import ADAPTER, MODEL
from torchwright.hub.trained import write_trained_scheme
from torchwright.optimization.caches.why import counting
from torchwright.train.data.mixture import Walk
from torchwright.train.data.streams import ORDER, Windows
from torchwright.train.ledger import Ledger
from torchwright.train.model import save_folder
from torchwright.train.model.foreign import Foreign, ForeignConfig, read_model_config, save_foreign
from torchwright.train.model.lora import merged
from torchwright.train.parallel.stages import Staged
from torchwright.train.run.config.run import FEW_BITS, FREE, Run
from torchwright.train.run.config.run_file import changed_fields
from torchwright.train.run.config.schedule import ScheduledStep, plan_step, steps
from torchwright.train.run.loop.evaluate import Evaluator
from torchwright.train.run.loop.reference import with_reference
from torchwright.train.run.loop.session import RunOutcome, RunSession
from torchwright.train.run.objectives.adapt import base_digests, write_adapters
from torchwright.train.run.objectives.heads import write_head
from torchwright.train.run.objectives.learner import LanguageLearner
from torchwright.train.run.objectives.not_finite import first_not_finite, not_finite_message
from torchwright.train.run.objectives.step import MicroBatch, StepFigures, let_signals_in
from torchwright.train.run.observe.metrics import HELD_OUT
from torchwright.train.run.runtime.checkpoint import CheckpointError, Described
from torchwright.train.run.runtime.compiled import CompiledCode
from torchwright.train.run.runtime.corpus import TOKENS, check_context, epochs, left_out, open_data, walk_of
from torchwright.train.run.runtime.processes import ProcessRank, on_first
from torchwright.train.run.runtime.source import write_source
from torchwright.train.shape import Shape


@dataclass(frozen=True, kw_only=True)
class TrainingOutcome(RunOutcome):
    """The outcome of a language model's run."""

    tokens: int
    validation_loss: float | None
    best_validation_loss: float | None
    best_step: int | None
    """The step with the best validation loss."""
    adapter: Path | None
    """The folder of the trained adapters, where the run has some and reached its end."""


class Trainer(RunSession[Run, TrainingOutcome]):
    """One process's part of a language model's run."""

    unit, free = "tokens", FREE

    def __init__(
        self,
        run: Run,
        folder: Path,
        out: Path,
        place: ProcessRank,
        ledger: Ledger,
        *,
        live: bool,
        profile: range = range(0),
        trust: bool = False,
    ) -> None:
        """`trust` takes compiled code that another user's run left in the folder."""
        super().__init__(run, out, place, ledger, steps=steps(run), live=live, profile=profile)
        self.folder = folder
        self.source = on_first(lambda: write_source(run, folder, out))
        self.config = read_model_config(self.source)
        check_context(run, self.config)
        self.corpus = open_data(run, self.config, folder, self.source, out)
        self.learner = LanguageLearner(run, self.config, folder, place.device)
        if place.world == 1 and not run.compile:  # compiled layers run Python of their own
            let_signals_in(self.learner.model)
        self.corpus = with_reference(run, self.corpus, self.learner, folder, out / TOKENS)
        self.evaluator = Evaluator(run, self.config, self.source, self.corpus, place.device)
        self.base = on_first(self._base)
        self.peak_tflops = run.peak_tflops or on_first(lambda: _measured_peak(run, get_device(place.device)))
        self.validation_loss: float | None = None
        self._walks: dict[int, Walk] = {}
        self._compiled: set[int] = set()
        self._code = CompiledCode(out, place, trust=trust) if run.compile else None

    def unlike(self, saved: Described, now: Described) -> list[str]:
        if saved.facts.get("order") != ORDER:
            raise CheckpointError(
                f"the checkpoint of step {saved.step} was made by a version "
                "that read the training data in another order",
                found="windows cut file by file, without the ends of files; its place in that order means nothing here",
                next="finish the run with the version that began it, or train anew into another `out`",
            )
        if self.run.optimizer.name in FEW_BITS or self.run.deterministic:
            return changed_fields({"layout": saved.run["layout"]}, {"layout": now.run["layout"]})
        return []

    def data_facts(self) -> dict[str, Any]:
        return self.corpus.facts()

    def begin(self) -> None:
        """Report what is read of each file, what windows leave out, and what is held out."""
        self.tell_rows(self.corpus.reports, numbered="row")
        self.recall_best()
        if self.run.data.hold_out is not None:
            held = self.corpus.validation
            self.tell_held_out(0 if held is None else held.tokens, self.corpus.tokens)
        if self._code is not None and (reason := self._code.restore()):
            self.metrics.event("compiled_code", reason=reason)
            self.metrics.show(reason)
        if self.done < self.last:
            self._windows(plan_step(self.run, self.done))

    def read(self) -> list[MicroBatch]:
        self.step = plan_step(self.run, self.done)
        self.learner.begin(self.step)
        return self.learner.batches.of_step(self.step, self._windows(self.step))

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        # The compiler runs when it first meets a shape; the rest of that step counts as compiling.
        context = self.step.context
        new = self.run.compile and context not in self._compiled
        with self._compiling(context) if new else contextlib.nullcontext(), self.dropping():
            yield
            self._compiled.add(context)

    def update(self, figures: StepFigures, batches: list[MicroBatch]) -> None:
        step, learner = self.step, self.learner
        if not figures.finite:
            sighting = first_not_finite(
                learner.model, partial(learner.again, step, batches), learner.places(step, batches)
            )
            first = not_finite_message(sighting, step.first, step.rows, self._windows(step).describe)
            raise self.not_finite(
                figures,
                found=f"{first}; {step.tokens:,} tokens were seen before it",
                rates="optimizer.lr or clip",
            )
        learner.update(step)

    @contextlib.contextmanager
    def _compiling(self, context: int) -> Iterator[None]:
        """Count what the compiler makes in the block, for the ledger."""
        assert self._code is not None
        with self.ledger.phase("compile"), counting() as so_far:
            yield
        compiled = so_far()
        self.ledger.compiled(found=compiled.found, made=compiled.missed + compiled.passed + compiled.objects)
        self._code.made(f"a step of {context} tokens")

    def save(self, *, last: bool = False) -> None:
        super().save(last=last)
        if self._code is not None and (reason := self._code.keep()):
            self.metrics.event("compiled_code", reason=reason)
            self.metrics.show(reason)

    def _windows(self, step: ScheduledStep) -> Walk:
        if step.phase not in self._walks:
            self._walks[step.phase] = walk_of(
                self.run, self.corpus, step.context, self.config.bos, step.phase
            )
            self._tell_left_out(self._walks[step.phase])
        return self._walks[step.phase]

    def _tell_left_out(self, walk: Walk) -> None:
        for source, packed in left_out(walk, strict=bool(self.run.data.strict)).items():
            cut, dropped = packed.pieces.cut, packed.pieces.dropped
            self.metrics.event("long_documents", source=source, cut=cut, left_out=dropped)
            # Under --quiet as well: of a document that is left out nothing is learnt.
            tell = self.metrics.warn if dropped else self.metrics.show
            tell(
                f"{source}: windows of {packed.context:,} tokens cut off the end of {cut:,} documents and leave "
                f"{dropped:,} out, of which nothing would be trained on"
            )

    def evaluate(self) -> None:
        with self.ledger.phase("evaluation"), self.learner.evaluating():
            figures = self.evaluator.measure(self.learner.objective, self.learner.batches)
            if figures:
                self.validation_loss = figures[f"{HELD_OUT}loss"]
                self.metrics.figures(self.done, figures, event="evaluation")
                self.judge(self.validation_loss)
            samples = self.evaluator.samples(self.learner.model)
            for prompt, text in zip(self.run.evaluation.prompts, samples, strict=True):
                self.metrics.event("sample", at=self.done, prompt=prompt, text=text)
                self.metrics.show(f"step {self.done}: {text}")

    def progress(self, units_per_s: float) -> dict[str, float | None]:
        step, mfu = self.step, None
        if self.peak_tflops is not None:
            achieved = self._flops(step.context) * units_per_s / self.place.world
            mfu = achieved / (self.peak_tflops * 1e12)
        return {
            "epoch": epochs(self._windows(step), step.first + step.rows),
            "lr": step.rate * self.run.optimizer.lr,
            "mfu": mfu,
        }

    def _flops(self, context: int) -> float:
        """Return operations per token; a frozen matrix needs no gradient of its own, a third of its operations."""
        if isinstance(self.config, ForeignConfig):
            count = sum(parameter.numel() for parameter in self.learner.model.parameters())
            return (4 if self.run.lora else 6) * count
        shape = Shape(self.config)
        return shape.model_flops(context) - (2 * shape.matrices if self.run.lora else 0)

    def finish(self, figures: StepFigures | None) -> TrainingOutcome:
        finished = self.done == self.last and self.evaluated()
        if finished:
            self.tell_best(self.validation_loss)
        with self.ledger.phase("checkpoint"):
            self.save(last=True)
            self.checkpoints.wait()
            if finished and self.run.lora is not None:
                self.write(ADAPTER, self._save_adapters)
            if finished and self.run.keeps_model:
                self.write(MODEL, self._save_model)
        if finished and self.run.qat is not None:
            with self.ledger.phase("evaluation"):
                on_first(self._write_receipt)
        return TrainingOutcome(
            out=self.out,
            steps=self.done,
            tokens=self.counted,
            loss=None if figures is None else figures.loss,
            validation_loss=self.validation_loss,
            best_validation_loss=self.best.loss if self.best.step else None,
            best_step=self.best.step or None,
            effective_time=self.ledger.effective(),
            model=self.out / MODEL if finished and self.run.keeps_model else None,
            adapter=self.out / ADAPTER if finished and self.run.lora is not None else None,
            signal=self.leave_signal(finished),
        )

    def _save_model(self, folder: Path) -> None:
        model, adapted = self.learner.model, self.run.lora is not None
        if isinstance(model, Foreign):
            save_foreign(model.network, folder, source=self.source, writes=self.place.first)
            return
        values = merged(model) if adapted else model.values() if isinstance(model, Staged) else None
        save_folder(model, model.config, folder, source=self.source, value=values)
        if not self.place.first:
            return
        if self.run.qat is not None:
            write_trained_scheme(folder, scheme_of(self.run.qat.scheme, self.run.qat.group_size))
        if self.run.head is not None:
            write_head(self.run.head, folder)

    def _save_adapters(self, folder: Path) -> None:
        lora, base = self.run.lora, self.run.model.folder
        assert lora is not None
        assert base is not None
        path = str((self.folder / base).resolve())
        write_adapters(self.learner.model, lora, path, folder if self.place.first else None)

    def _base(self) -> dict[str, str]:
        """Return digests of what a checkpoint does not hold: the frozen weights under adapters."""
        if self.run.lora is None or self.run.model.folder is None:
            return {}
        return base_digests(self.folder / self.run.model.folder)

    def _write_receipt(self) -> None:
        """Write the QAT receipt: the served model is the trained one. The first process loads the model again."""
        from torchwright.train.run.objectives.qat import write_receipt

        assert self.run.qat is not None
        rows = max(1, self.run.qat.receipt_tokens // self.run.context)
        shards = self.corpus.validation or next(iter(self.corpus.train.values()))
        ids_BT = Windows(shards, self.run.context, 0).batch(0, rows).ids_BT
        receipt = write_receipt(self.out / MODEL, ids_BT, self.run.qat, self.out)
        self.metrics.event("qat_receipt", **dataclasses.asdict(receipt))
        self.metrics.show(
            f"QAT receipt ({receipt.scheme}): served logits differ from the trained ones by "
            f"{receipt.served.relative:.2e} (relative), top-1 agreement {receipt.served.top1_agreement:.1%}"
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything that a step changes, by name."""
        return {f"model.{name}": value for name, value in self.learner.tensors().items()} | {
            f"optimizer.{name}": value for name, value in self.learner.optimizers.tensors().items()
        }

    def facts(self) -> dict[str, Any]:
        return {
            "order": ORDER,
            "train_tokens": self.corpus.tokens,
            "train_files": self.corpus.digest(),
            **({"base": self.base} if self.base else {}),
        }


def _measured_peak(run: Run, device: Device) -> float | None:
    """Return the peak TFLOP/s of a device in the type of the run's products; None if unknown."""
    ceilings = device.ceilings()
    rates = {} if ceilings.disturbed else ceilings.tflops
    return rates.get("float32" if run.precision == "fp32" else "bfloat16")
