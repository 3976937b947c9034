"""What a run minimizes, where it is not the loss of the next token: the run file's [preference] (no torch)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from torchwright.train.run.data_section import Section

LossName = Literal["dpo", "ipo", "hinge", "orpo", "simpo"]
BETA: dict[LossName, float] = {"dpo": 0.1, "ipo": 0.1, "hinge": 0.1, "orpo": 0.1, "simpo": 2.0}
MARGIN = 0.5


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
