"""Records of a data set on the Hugging Face hub, at a pinned revision."""

from __future__ import annotations

from typing import Any

from grpo_repro.errors import NotHere, UserError
from grpo_repro.network import reachable, take_the_cache
from grpo_repro.tasks.records import Record


def read(task_config: Any) -> dict[str, list[Record]]:
    """Download (or take from the cache) both splits of `task.hub` at `task.revision`.

    Args:
        task_config: A `TaskConfig` without a path.

    Returns:
        Records of `train` and `test`.

    Raises:
        NotHere: If the `datasets` package or the network is missing; the message names the other way, `task.path`.
    """
    name = task_config.name
    other = f"or give the files: task.path=DIR with train and test of {name} (JSON lines, JSON or parquet)"
    if not task_config.hub:
        raise UserError(f"task={name} has neither task.hub nor task.path; name a data set of the hub, {other}")
    try:
        import datasets
    except ImportError as error:
        raise NotHere(
            f"task.path is not set, and reading {task_config.hub} from the hub needs the package datasets; "
            f"pip install 'grpo-repro[data]', {other}"
        ) from error
    datasets.disable_progress_bars()
    try:
        if not reachable():
            take_the_cache()
        found = datasets.load_dataset(task_config.hub, task_config.subset, revision=task_config.revision)
        splits = {split: found[split].to_list() for split in ("train", "test")}
    except Exception as error:  # datasets, huggingface_hub, httpx and pyarrow each have their own
        reason = (str(error).strip().splitlines() or ["no message"])[0]
        raise NotHere(
            f"task.path is not set, and {task_config.hub} could not be read from the hub ({type(error).__name__}: "
            f"{reason[:160]}); connect to the network, {other}"
        ) from error
    place = f"{task_config.hub}@{str(task_config.revision)[:8]} {{}}:{{}}"
    return {
        split: [Record(place.format(split, i), f"{split}:{i}", row) for i, row in enumerate(rows, 1)]
        for split, rows in splits.items()
    }
