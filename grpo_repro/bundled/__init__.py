"""The policies that ship with the package: transformers directories, found with `path`."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

NAMES = ("base", "instruct")


def path(name: str) -> Path:
    """Directory of a bundled model.

    Args:
        name: one of `NAMES`.

    Raises:
        UserError: unknown name.
    """
    if name not in NAMES:
        from grpo_repro.errors import UserError

        raise UserError(f"no bundled model {name!r}; choose one of: {', '.join(NAMES)}")
    return Path(str(files(__name__))) / name
