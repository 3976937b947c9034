"""The scorecard as plain data: `dataclasses.asdict` gives JSON."""

from __future__ import annotations

from dataclasses import dataclass, field

FAMILIES = ("forward", "gradient", "modules", "optimizers")
"""Groups of samples, each with a share of its own: results of operators, their gradients, layers, optimizer steps."""
OUTCOMES = ("passed", "wrong", "refused", "crashed", "hung")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A kind of failure of one entry, with the first message and the number of samples that have it."""

    entry: str
    """Name of the operator, the layer or the optimizer, as PyTorch's tests have it."""
    family: str
    outcome: str
    samples: int
    message: str


@dataclass(frozen=True, kw_only=True)
class Share:
    """Samples of a family by outcome. Samples on which the CPU itself fails are not counted."""

    family: str
    passed: int
    total: int

    @property
    def fraction(self) -> float | None:
        """None: no sample of this family was taken."""
        return self.passed / self.total if self.total else None


@dataclass
class Scorecard:
    """Outcomes of samples on one device."""

    device: str
    torch: str
    machine: str
    entries: int = 0
    """Operators, layers and optimizers of which at least one sample was taken."""
    seconds: float = 0.0
    counts: dict[str, dict[str, int]] = field(
        default_factory=lambda: {family: dict.fromkeys(OUTCOMES, 0) for family in FAMILIES}
    )
    faults: list[Fault] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    """Entries without a sample to compare, with the reason."""

    def add(self, family: str, outcome: str, samples: int) -> None:
        self.counts[family][outcome] += samples

    def shares(self) -> list[Share]:
        """Return the share of passed samples of each family."""
        return [
            Share(family=family, passed=found["passed"], total=sum(found[each] for each in OUTCOMES))
            for family, found in self.counts.items()
        ]
