"""Learning rates by iteration: the theory's two schedules and those of practice."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def learning_rate(config: Mapping[str, Any], iteration: int) -> float:
    """Rate of one update.

    - `constant`: beta;
    - `inverse`: beta / i (Lemma 6 and Theorem 8 ask beta > 1/(2 mu));
    - `cosine`: beta (1 + cos(pi (i - 1) / iterations)) / 2.

    With `warmup` w > 0 the first w updates take the factor i / w.

    Args:
        config: Holds `learning_rate` (beta), `schedule`, `warmup` and `iterations`.
        iteration: i, counted from 1.

    Returns:
        The rate, in units of the parameter per unit of gradient.

    >>> learning_rate({"learning_rate": 3.0, "schedule": "inverse", "warmup": 0, "iterations": 9}, 3)
    1.0
    """
    rate = float(config["learning_rate"])
    if config["schedule"] == "inverse":
        rate /= iteration
    elif config["schedule"] == "cosine":
        rate *= (1 + math.cos(math.pi * (iteration - 1) / config["iterations"])) / 2
    return rate * min(1.0, iteration / config["warmup"]) if config["warmup"] else rate
