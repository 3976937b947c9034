"""Checks of a language model's run file: fields that do not go together (no torch)."""

from __future__ import annotations

from torchwright.train.run.config.data_section import RunError
from torchwright.train.run.config.objective_section import OF_ONE_LOSS
from torchwright.train.run.config.pipeline_section import check_pipeline
from torchwright.train.run.config.run import Experts, OptimizerSection, Run

OF_ONE = (
    ("schedule", "decay_fraction", "wsd"),
    ("schedule", "decay_context", "wsd"),
    ("optimizer", "adam_lr", "muon"),
    ("optimizer", "momentum", "muon"),
)
"""Section, field and the one name with which the field says anything; None where it is not given."""


def check_run(run: Run) -> None:
    """Raise `RunError` or `LayoutError` for values that do not fit together."""
    for context in {run.context, run.schedule.decay_context or run.context}:
        _check_windows(run, context)
    asked_for = {
        "lora": run.lora is not None,
        "qat": run.qat is not None,
        "compile": run.compile,
        "recompute": run.recompute != "none",
    }
    check_pipeline(run.pipeline, run.parallel, run.micro_batches, asked_for)
    _check_fields_of_one(run)
    if run.qat is not None:
        _check_qat(run)
    if run.gather is not None:
        _check_gather(run)
    if run.experts is not None:
        _check_experts(run, run.experts)
    if run.lora is not None:
        _check_lora(run)
    if run.needs is not None:
        _check_objective(run)
    _check_evaluation(run)
    if run.schedule.warmup_tokens > run.tokens:
        raise RunError(
            "the warm-up is longer than the run, and its peak rate is never reached",
            found=f"schedule.warmup_tokens={run.schedule.warmup_tokens:,}, tokens={run.tokens:,}",
            next="use fewer warm-up tokens (a tenth of the run, or fewer), or more tokens",
        )


def _check_windows(run: Run, context: int) -> None:
    """Raise `RunError` for windows of which a step holds no whole number, or that cannot be divided or led."""
    layout = run.parallel
    step = context * layout.batch_ways * run.micro_batches
    if run.batch_tokens % step:
        raise RunError(
            f"batch_tokens={run.batch_tokens} cannot be divided",
            found=f"windows of {context} tokens x {layout.batch_ways} parts of the batch (dp_replicate x dp_shard) "
            f"x {run.micro_batches} micro-batches = {step}",
            next=f"use a multiple of {step}, or fewer micro_batches",
        )
    if context % (layout.cp * layout.tp):
        raise RunError(
            f"windows of {context} tokens cannot be divided over cp={layout.cp} x tp={layout.tp} processes",
            next=f"use a multiple of {layout.cp * layout.tp} as `context` and `decay_context`",
        )
    if run.data.begin_every and run.data.packing == "documents":
        raise RunError(
            "data.begin_every leads windows of a stream, and data.packing is 'documents'",
            next="leave one of them out",
        )
    if run.data.begin_every and context == 1:
        raise RunError("data.begin_every leaves no room for text in windows of 1 token")


def _check_fields_of_one(run: Run) -> None:
    """Raise `RunError` for fields that the chosen schedule or optimizer does not read."""
    for section, field, name in OF_ONE:
        part = getattr(run, section)
        if getattr(part, field) is not None and part.name != name:
            raise RunError(f"{section}.{field} is for {section} '{name}'", found=part.name)
    rates = (run.optimizer.betas, run.optimizer.eps)
    if run.optimizer.name == "adafactor" and rates != (OptimizerSection().betas, OptimizerSection().eps):
        raise RunError(
            "optimizer.betas and optimizer.eps are AdamW's", found="adafactor", next="leave them out"
        )


def _check_qat(run: Run) -> None:
    """Raise `RunError` for what does not go with weights that are rounded as the kernels round them."""
    layout = run.parallel
    if run.precision not in ("fp32", "bf16"):
        raise RunError(
            "qat rounds to the kernels' integers and does not go with another low precision",
            found=f"precision={run.precision}",
            allowed="fp32, bf16",
        )
    if run.compile:
        raise RunError("qat searches its scales in code that is not compiled", next="set compile = false")
    if layout.tp * layout.ep > 1:
        raise RunError(
            "the layout divides matrices that qat rounds as a whole",
            found=str(layout),
            allowed="tp=1 and ep=1 with qat",
        )


def _check_gather(run: Run) -> None:
    """Raise `RunError` for a run in which no float8 matrix is gathered."""
    layout = run.parallel
    if not run.precision.startswith("float8"):
        raise RunError(
            f"gather = '{run.gather}' is for layers that round their matrices to float8",
            found=f"precision={run.precision}",
            allowed="float8_tensorwise, float8_rowwise, float8_rowwise_with_gw_hp",
            next="leave gather out, or set one of these precisions",
        )
    if layout.dp_shard * layout.cp == 1:
        raise RunError(
            f"gather = '{run.gather}' is how processes hand each other what they share out, and none share anything",
            found=str(layout),
            next="leave gather out, or use dp_shard",
        )


def _check_experts(run: Run, experts: Experts) -> None:
    """Raise `RunError` for a dispatch without a journey, and what does not go with a bias that chooses experts."""
    if experts.dispatch == "deep_ep" and run.parallel.ep == 1:
        raise RunError(
            "experts.dispatch 'deep_ep' sends tokens to experts in other processes, and none are there",
            found=str(run.parallel),
            next="leave dispatch out, or use ep",
        )
    if experts.dispatch == "deep_ep" and run.precision == "fp32":
        raise RunError(
            "experts.dispatch 'deep_ep' sends tokens in bfloat16",
            found="precision=fp32",
            next="set precision = 'bf16', or leave dispatch out",
        )
    if experts.balance != "bias":
        if experts.bias_rate is not None:
            raise RunError(
                "experts.bias_rate is for experts.balance 'bias'", found=f"balance={experts.balance}"
            )
        return
    section = "[lora]" if run.lora else "[head]" if run.head else None
    if section is not None:
        raise RunError(
            f"experts.balance 'bias' does not go with {section}: what it writes has no place for the biases",
            next="give a coefficient as `balance`, or leave [experts] out",
        )


def _check_lora(run: Run) -> None:
    """Raise `RunError` for what does not go with adapters."""
    layout = run.parallel
    if run.model.folder is None:
        raise RunError("lora adapts a trained model", next="set model.folder, or leave [lora] out")
    if run.qat is not None or run.precision not in ("fp32", "bf16"):
        raise RunError(
            "lora does not go with qat, float8 and MX formats",
            found="qat" if run.qat else f"precision={run.precision}",
            allowed="precision fp32 or bf16, and lora.base nf4 or int4 for fewer bits",
        )
    if layout.tp * layout.ep > 1:
        raise RunError(
            "adapters lie beside whole matrices, and the layout divides them",
            found=str(layout),
            allowed="dp_replicate, dp_shard and cp with lora",
        )


def _check_objective(run: Run) -> None:
    """Raise `RunError` for what does not go with another loss than that of the next token."""
    section = "preference" if run.head is None else "head"
    for field, loss in OF_ONE_LOSS:
        if run.preference and getattr(run.preference, field) is not None and run.preference.loss != loss:
            raise RunError(f"preference.{field} is for the loss '{loss}'", found=run.preference.loss)
    for fault in run.head.faults if run.head else ():
        raise RunError(fault)
    layout = run.parallel
    refused = [
        ("model.config", run.model.folder is None, "a trained model: set model.folder"),
        ("layout", layout.pp * layout.cp * layout.tp * layout.ep > 1, "dp_replicate and dp_shard"),
        ("qat", run.qat is not None, "no [qat]"),
        ("data.form", run.data.form not in (None, run.needs), f"rows of {run.needs}: leave data.form out"),
        ("data.packing", run.data.packing == "stream", "whole rows: leave data.packing out"),
        ("data.begin_every", run.data.begin_every > 0, "leave data.begin_every out"),
    ]
    if run.head is not None:
        refused += [
            ("preference", run.preference is not None, "one of them"),
            ("lora", run.lora is not None, "all weights trained: leave [lora] out"),
            ("precision", run.precision not in ("fp32", "bf16"), "fp32, bf16"),
            ("compile", run.compile, "compile = false"),
            ("evaluation.prompts", bool(run.evaluation.prompts), "leave evaluation.prompts out"),
        ]
    for field, asked, allowed in refused:
        if asked:
            raise RunError(f"[{section}] does not go with this `{field}`", allowed=allowed)


def _check_evaluation(run: Run) -> None:
    """Raise `RunError` for an evaluation of nothing, or by what the layout has no process for."""
    if run.data.validates and run.evaluation.tokens < run.context:
        raise RunError(
            f"evaluation.tokens={run.evaluation.tokens} holds no window",
            found=f"context={run.context}",
            next=f"set evaluation.tokens to {run.context} or more, or hold nothing out",
        )
    if run.evaluation.prompts and run.parallel.cp > 1:
        raise RunError(
            "sample text is written by whole sequences", found=f"cp={run.parallel.cp}", allowed="cp=1"
        )
    if run.evaluation.every_steps and not (run.data.validates or run.evaluation.prompts):
        raise RunError(
            "evaluation.every_steps is set, but there is nothing to evaluate",
            next="set data.validation, data.hold_out or evaluation.prompts",
        )
