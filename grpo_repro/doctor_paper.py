"""Checks of what the paper's runs need beyond the bundled job: a GPU, data, models, space; none fails the doctor."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

from grpo_repro.config import load_choice
from grpo_repro.doctor_check import Check

RUNS = {
    "fig4": (("qwen2.5-0.5b", "qwen2.5-0.5b-instruct"), None),
    "fig5": (("qwen2.5-1.5b-instruct",), "gsm8k"),
    "table2": (("qwen2.5-math-7b",), "math"),
}
"""Models of each of the paper's runs, and the task whose data it needs."""

MODELS_GIB, STATE_GIB = 21.0, 85.0
"""Disk space of the four models in bfloat16, and of the saved state of a run that trains all weights of the largest."""


def gpu() -> Check:
    """Which GPUs torch sees and what each holds."""
    import torch

    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    listed = ", ".join(f"{one.name} {one.total_memory / 2**30:.0f} GiB" for one in found)
    absent = "none: the paper's models need one; the bundled and tabular policies do not"
    return Check("gpu", bool(found), listed or absent, needed=False)


def datasets() -> Check:
    """Whether data sets can be read from the hub."""
    ready = find_spec("datasets") is not None
    detail = "installed" if ready else "not installed: pip install 'grpo-repro[data]', or task.path=DIR"
    return Check("datasets", ready, detail, needed=False)


def data() -> Check:
    """Which of the paper's data sets lie in the cache."""
    wanted = [task for _, task in RUNS.values() if task]
    here = [task for task in wanted if _has_data(task)]
    return _listed("paper's data", wanted, here, "downloaded at first use where the hub is reachable")


def _has_data(task: str) -> bool:
    root, hub = os.environ.get("HF_DATASETS_CACHE"), str(load_choice("task", task).hub)
    folder = Path(root) if root else _hub_home() / "datasets"
    return any((folder / name).is_dir() for name in (hub.replace("/", "___"), hub.replace("/", "___").lower()))


def models() -> Check:
    """Which of the paper's models lie in the hub's cache."""
    wanted = [name for names, _ in RUNS.values() for name in names]
    here = [name for name in wanted if _has_model(name)]
    return _listed("paper's models", wanted, here, "downloaded at first use, or model.path=DIR")


def _has_model(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    path, files = str(load_choice("model", name).path), ("model.safetensors", "model.safetensors.index.json")
    return any(isinstance(try_to_load_from_cache(path, file), str) for file in files)


def space() -> Check:
    """Whether the disk of the hub's cache holds the models, and what saved states take."""
    home = _hub_home()
    while not home.exists():
        home = home.parent
    free = shutil.disk_usage(home).free / 2**30
    detail = f"{free:.0f} GiB free; the four models take {MODELS_GIB:.0f}, a saved state of the largest {STATE_GIB:.0f}"
    return Check("space for models", free >= MODELS_GIB + STATE_GIB, detail, needed=False)


def summary(found: list[Check]) -> list[Check]:
    """What each of the paper's runs still lacks, from the checks above.

    Args:
        found: All checks so far.

    Returns:
        A check for each of the three runs.
    """
    state = {check.name: check.ok for check in found}
    reachable, reader = state.get("hub", False), state.get("datasets", False)
    checks = []
    for run, (names, task) in RUNS.items():
        lacks = [] if state.get("gpu", False) else ["a GPU"]
        lacks += [f"the model {name}" for name in names if not (reachable or _has_model(name))]
        if task and not (reader and (reachable or _has_data(task))):
            lacks.append(f"the data of {task}" if reader else "the package datasets")
        if task == "math" and not state.get("math-verify", False):
            lacks.append("math-verify")
        detail = f"lacks {', '.join(lacks)}" if lacks else "ready"
        checks.append(Check(f"+paper={run}", not lacks, detail, needed=False))
    return checks


def _listed(name: str, wanted: list[str], here: list[str], remedy: str) -> Check:
    missing = [one for one in wanted if one not in here]
    parts = [f"in the cache: {', '.join(here) or 'none'}"]
    parts += [f"not there: {', '.join(missing)} ({remedy})"] if missing else []
    return Check(name, not missing, "; ".join(parts), needed=False)


def _hub_home() -> Path:
    """Folder of the hub's caches."""
    home = os.environ.get("HF_HOME")
    return Path(home).expanduser() if home else Path.home() / ".cache" / "huggingface"
