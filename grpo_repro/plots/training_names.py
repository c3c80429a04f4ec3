"""Names and numbers of training runs as figures, captions and tables write them."""

from __future__ import annotations

import math
from collections.abc import Iterable

from grpo_repro.plots.training_data import Choice, Setting
from grpo_repro.selection import Selection
from grpo_repro.stats import Interval

METRIC_NAMES = {"suboptimality_gap": "suboptimality gap", "accuracy": "test accuracy"}
SHOWN = ("optimizer", "schedule", "learning_rate", "pool", "order")
"""Keys of the method that every title holds; the others are added where they tell settings apart."""
STATED = ("normalize", "minibatches", "kl_coefficient", "kl_estimator", "importance_cap")
"""Options that a method holds only where they are in use: they are always named."""

ORDERS = {"iid": "i.i.d."}


def title(setting: Setting, others: Iterable[Setting] = (), where: str = "", without: tuple[str, ...] = ()) -> str:
    """Name a setting, as ``bundled-base, arithmetic, N = 256: adamw, constant 3e-4, pool 500 (i.i.d.)``.

    Args:
        setting: What was trained and how.
        others: Settings that it must be told from.
        where: Budget or checkpoint, after the task.
        without: Keys of the method that are not named.
    """
    keys = {name: value for name, value in setting.keys.items() if name not in without}
    kin = [other for other in (*others, setting) if (other.model, other.task) == (setting.model, setting.task)]
    parts = [keys.get("optimizer", ""), schedule(keys), pool(keys)]
    for name in keys:
        told = name not in SHOWN and len({other.keys.get(name) for other in kin}) > 1
        if name in STATED or told:
            parts.append(f"{name.replace('_', ' ')} {keys[name]}")
    if setting.estimator != "grpo":
        parts.append(f"{setting.estimator} estimator")
    model = setting.model.replace("$", r"\$")  # no mathematics for matplotlib
    head = ", ".join(part for part in (model, setting.task, where) if part)
    tail = ", ".join(part for part in parts if part)
    return f"{head}: {tail}" if tail else head


def schedule(keys: dict[str, str]) -> str:
    """Write schedule and learning rate, as ``constant 3e-4``."""
    rate = f"{keys['learning_rate']}" if "learning_rate" in keys else ""
    return f"{keys.get('schedule', '')} {_rate(rate)}".strip()


def pool(keys: dict[str, str]) -> str:
    """Write the pool of prompts and how it is gone through, as ``pool 500 (i.i.d.)``."""
    if "pool" not in keys:
        return ""
    order = keys.get("order", "")
    name = "all prompts" if keys["pool"] == "all" else f"pool {keys['pool']}"
    return f"{name} ({ORDERS.get(order, order)})" if order else name


def _rate(text: str) -> str:
    try:
        value = float(text)
    except ValueError:
        return text
    if value == 0 or 0.01 <= abs(value) < 1000:
        return f"{value:g}"
    mantissa, exponent = f"{value:.6e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def short(value: float, digits: int = 3) -> str:
    """Write a number with so many decimals and a true minus sign."""
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    return f"{round(value, digits) + 0.0:.{digits}f}".replace("-", "−")


def interval(found: Interval, digits: int = 3) -> str:
    """Write ``0.312 [0.300, 0.324]``; without a width the number stands alone."""
    value = short(found.value, digits)
    if found.low == found.high:
        return value
    return f"{value} [{short(found.low, digits)}, {short(found.high, digits)}]"


def decimals(choices: Iterable[Choice]) -> int:
    """Decimals that show two digits of the smallest mean, at least 3 and at most 8."""
    sizes = [abs(mean.value) for choice in choices for mean in choice.selection.means if mean.value]
    return min(8, max(3, 1 - math.floor(math.log10(min(sizes))))) if sizes else 3


def group_sizes(sizes: Iterable[int]) -> str:
    """Write group sizes, as ``8, 16``."""
    return ", ".join(str(size) for size in sizes)


def best(chosen: Selection) -> str:
    """Write the best G, its bootstrap interval, and the group sizes not told from it."""
    others = [size for size in chosen.indistinguishable if size != chosen.best]
    text = f"best G = {chosen.best} [{chosen.best_low}, {chosen.best_high}]"
    if others:
        return f"{text}, not told from it: {group_sizes(others)}"
    return text if len(chosen.group_sizes) == 1 else f"{text}, told from all others"
