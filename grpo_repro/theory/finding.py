"""What a check finds: statements with a prediction, an observation and a verdict, and the curves of its figure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float

from grpo_repro.stats import Interval

EQUAL, AT_MOST, AT_LEAST, REPORTED = "=", "<=", ">=", "reported"


@dataclass(frozen=True)
class Finding:
    """One statement that a check decides.

    The rule says how `observed` is held against `predicted`: `=`, `<=`, `>=`, or `reported` (a fact without a
    verdict). With an interval (a simulation) the statement fails when the whole interval contradicts it; with a
    tolerance (an exact computation) when the observation does, by more than the tolerance.

    Attributes:
        part: Short name, unique within the check, such as `grpo`.
        statement: What is claimed, one line; formulas in plain text.
        setting: Where: the family, the sizes, the number of simulated runs.
        predicted: The value of the formula, or the bound.
        observed: What was enumerated or simulated.
        rule: `EQUAL`, `AT_MOST`, `AT_LEAST` or `REPORTED`.
        low: Lower end of the observation's interval; None where it is exact.
        high: Upper end.
        tolerance: Largest absolute difference that is rounding; None where there is an interval.
    """

    part: str
    statement: str
    setting: str
    predicted: float
    observed: float
    rule: str = EQUAL
    low: float | None = None
    high: float | None = None
    tolerance: float | None = None

    @property
    def passed(self) -> bool:
        """The verdict; a value that is not a number never passes, a reported fact always does."""
        if self.rule == REPORTED:
            return True
        slack = 0.0 if self.tolerance is None else self.tolerance
        low = self.observed - slack if self.low is None else self.low
        high = self.observed + slack if self.high is None else self.high
        above, below = low <= self.predicted, high >= self.predicted
        return {EQUAL: above and below, AT_MOST: above, AT_LEAST: below}[self.rule]


def exact(
    part: str, statement: str, setting: str, predicted: float, observed: float, tolerance: float = 1e-10,
    rule: str = EQUAL,
) -> Finding:  # fmt: skip
    """A statement that is decided without chance, up to rounding."""
    return Finding(part, statement, setting, float(predicted), float(observed), rule, tolerance=tolerance)


def simulated(
    part: str, statement: str, setting: str, predicted: float, observed: Interval, rule: str = EQUAL
) -> Finding:
    """A statement that is decided by an interval at the work's confidence."""
    low, high = float(observed.low), float(observed.high)
    return Finding(part, statement, setting, float(predicted), float(observed.value), rule, low, high)


@dataclass(frozen=True)
class Curve:
    """Points of a figure.

    Attributes:
        panel: Panel of the check's figure to which it belongs; a name that `plots.theory` knows.
        name: Its label in the legend.
        kind: `predicted` (drawn as a line), `observed` (drawn as points) or `bound` (a dashed line).
        x: Abscissae.
        y: Ordinates.
        low: Lower ends of intervals, or None.
        high: Upper ends.
        estimator: Its estimator, which gives the colour; or None.
    """

    panel: str
    name: str
    kind: str
    x: Float[np.ndarray, " points"]
    y: Float[np.ndarray, " points"]
    low: Float[np.ndarray, " points"] | None = None
    high: Float[np.ndarray, " points"] | None = None
    estimator: str | None = None


@dataclass(frozen=True)
class Report:
    """All that a check finds."""

    findings: list[Finding]
    curves: list[Curve] = field(default_factory=list)


@dataclass(frozen=True)
class Work:
    """What a check is given beside its formulas.

    Attributes:
        seed: Root of its randomness.
        runs: Number of simulated runs of the largest simulation (Theorem 8); others take a fraction of it.
        confidence: Level of the intervals that decide. The default lets a true statement fail in one of 10,000 seeds,
            so that all of the checks together do in less than one of 100.
        progress: Called with (steps done, steps in all, what) within long simulations.
    """

    seed: int = 0
    runs: int = 20_000
    confidence: float = 0.9999
    progress: Callable[[int, int, str], None] = lambda done, total, what: None

    def rng(self, *names: str | int) -> np.random.Generator:
        """A generator of its own for each purpose, so that no simulation depends on which others are run."""
        words = [name if isinstance(name, int) else int.from_bytes(name.encode()) for name in names]
        return np.random.default_rng(np.random.SeedSequence([self.seed, *words]))
