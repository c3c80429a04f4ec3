"""Checks of the machine and the installation."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from grpo_repro import doctor_paper
from grpo_repro.config import choices, conf_dir
from grpo_repro.doctor_check import Check
from grpo_repro.network import HUB, SECONDS, answers

MINIMUM_DISK_GIB = 1.0


def diagnose(results_dir: Path) -> list[Check]:
    """Look at everything; a check that breaks is a check that failed.

    Args:
        results_dir: Folder of the results.

    Returns:
        The checks, in the order in which a user mends them.
    """
    looks: list[tuple[str, Callable[[], Check]]] = [
        ("python", _python),
        ("torch", _torch),
        ("transformers", _transformers),
        ("conf", _conf),
        ("bundled models", _bundled),
        ("results folder", lambda: _writable(results_dir)),
        ("disk", lambda: _disk(results_dir)),
        ("matplotlib", _matplotlib),
        ("math-verify", _math_verify),
        ("launchers", _launchers),
        ("vllm", _vllm),
        ("hub", _hub),
        ("gpu", doctor_paper.gpu),
        ("datasets", doctor_paper.datasets),
        ("paper's data", doctor_paper.data),
        ("paper's models", doctor_paper.models),
        ("space for models", doctor_paper.space),
    ]
    found = []
    for name, look in looks:
        try:
            found.append(look())
        except Exception as error:
            needed = look.__module__ != doctor_paper.__name__
            found.append(Check(name, False, f"{type(error).__name__}: {error}", needed))
    return found + doctor_paper.summary(found)


def _python() -> Check:
    return Check("python", True, f"{platform.python_version()} on {platform.platform()}")


def _torch() -> Check:
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    device = ", ".join(gpus) if gpus else "cpu only"
    return Check("torch", True, f"{torch.__version__}, {device}, {torch.get_num_threads()} threads")


def _transformers() -> Check:
    import transformers

    return Check("transformers", True, transformers.__version__)


def _conf() -> Check:
    models = choices("model")
    return Check("conf", bool(models), f"{conf_dir()}, models {', '.join(models)}")


def _bundled() -> Check:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from grpo_repro import bundled

    logging.disable_progress_bar()
    sizes = []
    for name in ("base", "instruct"):
        folder = bundled.path(name)
        AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
        sizes.append(f"{name} ({sum(weight.numel() for weight in model.parameters()):,} parameters)")
    return Check("bundled models", True, ", ".join(sizes))


def _writable(results_dir: Path) -> Check:
    folder = _nearest(results_dir)
    try:
        if folder.is_symlink() and not folder.exists():
            raise FileNotFoundError(2, f"{folder} is a link to nothing")
        if not folder.is_dir():
            raise NotADirectoryError(20, "Not a directory")
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Check("results folder", False, f"{results_dir}: {error.strerror}; name another with results_dir=DIR")
    return Check("results folder", True, f"{results_dir.absolute()} is writable")


def _nearest(path: Path) -> Path:
    """Return the path, or the nearest above it that exists, be it a link to nothing."""
    path = path.absolute()
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path


def _disk(results_dir: Path) -> Check:
    folder = _nearest(results_dir)
    free = shutil.disk_usage(folder if folder.exists() else folder.parent).free / 2**30
    remedy = "" if free >= MINIMUM_DISK_GIB else f"; free {MINIMUM_DISK_GIB:g} GiB or use another disk"
    return Check("disk", free >= MINIMUM_DISK_GIB, f"{free:.1f} GiB free{remedy}")


def _matplotlib() -> Check:
    import io

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    Figure().savefig(io.BytesIO(), format="png")
    return Check("matplotlib", True, f"{matplotlib.__version__} draws without a display")


def _math_verify() -> Check:
    version = _version("math-verify")
    return Check("math-verify", version is not None, version or "not installed; pip install math-verify", needed=False)


def _launchers() -> Check:
    names = {
        "hydra-joblib-launcher": "joblib",
        "hydra-submitit-launcher": "submitit",
        "hydra-ray-launcher": "ray",
    }
    found = [short for name, short in names.items() if _version(name)]
    detail = f"basic, {', '.join(found)}" if found else "basic only; more: pip install 'grpo-repro[slurm]' or [ray]"
    return Check("launchers", bool(found), detail, needed=False)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _vllm() -> Check:
    from grpo_repro.sampler_options import HOW_TO_INSTALL, installed

    if not installed():
        return Check("vllm", False, f"not installed; sampler=vllm needs it: {HOW_TO_INSTALL}", needed=False)
    from grpo_repro.engine.vllm_engine import environment, version

    environment()
    try:
        from vllm import LLM  # noqa: F401
        from vllm.platforms import current_platform
    except Exception as error:  # an incomplete installation fails in many ways
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return Check("vllm", False, f"{version()} does not import ({reason}); {HOW_TO_INSTALL}", needed=False)
    return Check("vllm", True, f"{version()} is ready on {current_platform.device_type}: sampler=vllm", needed=False)


def _hub() -> Check:
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return Check("hub", False, "HF_HUB_OFFLINE is set: only local models", needed=False)
    reached = answers(lambda: socket.create_connection((HUB, 443), timeout=SECONDS).close())
    detail = "huggingface.co is reachable" if reached else "no huggingface.co: only local models"
    return Check("hub", reached, detail, needed=False)
