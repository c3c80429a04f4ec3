"""Partial state of a long cell: tensors in safetensors files, each replaced in one rename."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from grpo_repro.errors import ResultsError

SECONDS = 60.0
"""Longest time of work that a kill may cost, plus one batch."""

SHARE = 0.05
"""Largest share of the time that goes into saving: large states are saved more seldom."""


class Checkpoint:
    """Named states of one cell in its work folder.

    Args:
        folder: The work folder.
        owner: Id of the cell; a state of another one is not taken up.
        seconds: Time between saves.
    """

    def __init__(self, folder: Path, owner: str, seconds: float = SECONDS) -> None:
        self.folder, self.owner, self.seconds = folder, owner, seconds
        self._last, self._cost = time.monotonic(), 0.0

    def restore(self, name: str, blank: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return a saved state, or `blank` if there is none of the same form (the work is then done again)."""
        state = self.load(name)
        if state is None:
            return blank
        form = {key: (value.shape, value.dtype) for key, value in state.items()}
        return state if form == {key: (value.shape, value.dtype) for key, value in blank.items()} else blank

    def load(self, name: str) -> dict[str, torch.Tensor] | None:
        """Return a saved state, or None if there is none of this cell that can be read."""
        try:
            with safe_open(self.folder / f"{name}.safetensors", framework="pt") as file:
                if (file.metadata() or {}).get("cell") != self.owner:
                    return None
                return {key: file.get_tensor(key) for key in file.keys()}
        except (OSError, SafetensorError):
            return None

    def due(self) -> bool:
        """Tell whether the last time of saving is long enough ago."""
        if self.seconds == 0:
            return True
        return time.monotonic() - self._last > max(self.seconds, self._cost / SHARE)

    def save(self, name: str, state: dict[str, torch.Tensor]) -> None:
        """Write a state; it replaces the last one in one rename, so that a kill leaves one or the other."""
        start = time.monotonic()
        temporary = self.folder / f".{name}.tmp"
        try:
            save_file({key: x.contiguous() for key, x in state.items()}, temporary, metadata={"cell": self.owner})
            os.replace(temporary, self.folder / f"{name}.safetensors")
        except (OSError, SafetensorError) as error:
            with suppress(OSError):
                temporary.unlink()
            raise ResultsError(
                f"cannot save the partial work in {self.folder}: {error}; free space and run the same command again "
                "(what was saved before is kept)"
            ) from error
        self._last = time.monotonic()
        self._cost = self._last - start

    def save_sometimes(self, name: str, state: dict[str, torch.Tensor]) -> None:
        """Save if the last time is long enough ago."""
        if self.due():
            self.save(name, state)
