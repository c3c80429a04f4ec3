"""What the paper publishes of its training runs, as data: Table 2, and the settings of Figure 5 (arXiv 2603.01162)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float


@dataclass(frozen=True)
class TrainingSetting:
    """Settings of one of the paper's training experiments.

    Attributes:
        model: Policy.
        task: Questions.
        budgets: Completions per iteration, N.
        group_sizes: Completions per prompt, G.
        checkpoints: Iterations n whose test accuracy is published; empty if the paper gives the last one only.
        runs: Runs for each G and N.
        test_questions: Number of test questions behind one accuracy.
    """

    model: str
    task: str
    budgets: tuple[int, ...]
    group_sizes: tuple[int, ...]
    checkpoints: tuple[int, ...]
    runs: int
    test_questions: int


GROUP_SIZES = (4, 8, 16, 32, 64, 128)

FIGURE5 = TrainingSetting(
    "Qwen2.5-1.5B-Instruct", "GSM8K", (1024,), GROUP_SIZES, (200, 300, 400, 600, 800), runs=5, test_questions=1319
)
"""Figure 5: besides these checkpoints the last one, whose number the paper does not state."""

FIGURE5_BEST = {300: 32, 400: 32, 600: 32, 800: 32}
"""Checkpoint -> its best G, where the paper's text names it; at n = 200 it is another G."""

TABLE2 = TrainingSetting(
    "Qwen2.5-Math-7B", "MATH", (1024, 2048, 4096), GROUP_SIZES, (), runs=1, test_questions=5000
)  # fmt: skip

TABLE2_ACCURACY: dict[int, tuple[float, ...]] = {
    1024: (0.7677, 0.7491, 0.7753, 0.7627, 0.7817, 0.7743),
    2048: (0.7703, 0.7679, 0.7697, 0.7793, 0.7819, 0.7665),
    4096: (0.7691, 0.7713, 0.7701, 0.7673, 0.7703, 0.7757),
}
"""Table 2: N -> final test accuracy at each of `TABLE2.group_sizes`."""


def binomial_standard_error(accuracy: Float[np.ndarray, "*shape"], questions: int) -> Float[np.ndarray, "*shape"]:
    """Standard error sqrt(p(1-p)/M) of an accuracy over M questions, one completion each.

    It holds neither the spread between training runs nor that between random seeds of the evaluation.

    Args:
        accuracy: Fraction of right answers, p.
        questions: Number of questions, M.
    """
    return np.sqrt(accuracy * (1 - accuracy) / questions)
