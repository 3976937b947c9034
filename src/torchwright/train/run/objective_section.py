"""What a run minimizes, where it is not the loss of the next token: the run file's [preference] (no torch)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from torchwright.train.data.documents import RowsAs
from torchwright.train.run.data_section import RunError, Section

if TYPE_CHECKING:
    from torchwright.train.run.config import Run

LossName = Literal["dpo", "ipo", "hinge", "orpo", "simpo"]
BETA: dict[LossName, float] = {"dpo": 0.1, "ipo": 0.1, "hinge": 0.1, "orpo": 0.1, "simpo": 2.0}
MARGIN = 0.5
OF_ONE_LOSS = {"label_smoothing": "dpo", "margin": "simpo"}


class Preference(Section):
    """Train on pairs of answers, of which one is preferred."""

    loss: LossName = "dpo"
    """`orpo` and `simpo` need no reference."""
    beta: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """How much a log-probability counts; of `orpo` the weight of the odds. By default `BETA`."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] | None = None
    """`dpo`: the share of pairs that are taken to be the wrong way round."""
    margin: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """`simpo`: by how much the chosen answer is to win; by default `MARGIN`."""

    @property
    def strength(self) -> float:
        """beta."""
        return BETA[self.loss] if self.beta is None else self.beta

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with the model that the run starts from."""
        return self.loss in ("dpo", "ipo", "hinge")


def rows_as(run: Run) -> RowsAs:
    """How the run's rows are read: as its data says, and as what it minimizes needs them."""
    how = run.data.rows_as
    if run.preference is None:
        return how
    longest = min(run.context, run.schedule.decay_context or run.context)
    return dataclasses.replace(how, form="preference", longest=longest)


def check_objective(run: Run) -> None:
    """Raise `RunError` for what does not go with the run's objective."""
    chosen = run.preference
    if chosen is None:
        return
    for field, loss in OF_ONE_LOSS.items():
        if getattr(chosen, field) is not None and chosen.loss != loss:
            raise RunError(f"preference.{field} is for the loss '{loss}'", found=chosen.loss)
    layout = run.parallel
    refused = [
        ("model.config", run.model.folder is None, "a trained model: set model.folder"),
        ("layout", layout.cp * layout.tp * layout.ep > 1, "dp_replicate and dp_shard"),
        ("qat", run.qat is not None, "no [qat]"),
        ("data.form", run.data.form not in (None, "preference"), "rows with chosen and rejected"),
        ("data.packing", run.data.packing == "stream", "whole pairs: leave data.packing out"),
        ("data.begin_every", run.data.begin_every > 0, "leave data.begin_every out"),
    ]
    for field, asked, allowed in refused:
        if asked:
            raise RunError(f"[preference] does not go with this `{field}`", allowed=allowed)
