"""[preference] and [head] of run files: objectives other than the loss of the next token (no torch)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from torchwright.train.run.config.data_section import Section

LossName = Literal["dpo", "ipo", "hinge", "orpo", "simpo"]
BETA: dict[LossName, float] = {"dpo": 0.1, "ipo": 0.1, "hinge": 0.1, "orpo": 0.1, "simpo": 2.0}
MARGIN = 0.5
TEMPERATURE = 0.05
OF_ONE_LOSS = (("label_smoothing", "dpo"), ("margin", "simpo"))
"""Fields of [preference] and the one loss with which each says anything; None where it is not given."""
OF_ONE_KIND = (
    ("labels", "classification"),
    ("label_column", "classification"),
    ("pooling", "embedding"),
    ("temperature", "embedding"),
    ("anchor_column", "embedding"),
    ("positive_column", "embedding"),
)
"""The same for fields of [head] and its kinds."""


class Preference(Section):
    """Train on pairs of answers, of which one is preferred."""

    loss: LossName = "dpo"
    """`orpo` and `simpo` need no reference."""
    beta: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Weight of a log-probability; of `orpo` the weight of the odds. By default `BETA`."""
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
        """Check whether the loss compares with the model that the run starts from."""
        return self.loss in ("dpo", "ipo", "hinge")


class Head(Section):
    """Train the model to tell classes of texts, or to place texts so that like ones lie together."""

    kind: Literal["classification", "embedding"]
    labels: Annotated[list[str], Field(min_length=2)] | None = None
    """`classification`: the names of the classes. A row names one, or says its place in this list."""
    pooling: Literal["mean", "last"] | None = None
    """`embedding`: which hidden states of a text are its vector: the mean of all, by default, or the last."""
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """`embedding`: what cosines are divided by; by default `TEMPERATURE`."""
    label_column: str | None = None
    anchor_column: str | None = None
    positive_column: str | None = None

    @property
    def columns(self) -> dict[str, str]:
        """Return the columns that are read in addition to those of [data], by what they hold."""
        names = ("label", "anchor", "positive")
        return {name: getattr(self, f"{name}_column") or name for name in names}

    @property
    def faults(self) -> list[str]:
        """Return faults: fields that do not fit together."""
        found = [
            f"head.{field} is for the kind '{kind}'"
            for field, kind in OF_ONE_KIND
            if getattr(self, field) is not None and self.kind != kind
        ]
        if self.kind == "classification" and self.labels is None:
            found.append("head.labels has to name the classes")
        if self.labels is not None and len({*self.labels}) < len(self.labels):
            found.append("head.labels names a class twice")
        return found
