"""Partial state of a long cell: tensors in safetensors files, each replaced in one rename."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

SECONDS = 60.0
"""Longest time of work that a kill may cost, plus one batch."""


class Checkpoint:
    """Named states of one cell in its work folder."""

    def __init__(self, folder: Path, seconds: float = SECONDS) -> None:
        self.folder, self.seconds = folder, seconds
        self._last = time.monotonic()

    def restore(self, name: str) -> dict[str, torch.Tensor] | None:
        """Return a saved state; None if there is none or it cannot be read (the work is then done again)."""
        try:
            return load_file(self.folder / f"{name}.safetensors")
        except (OSError, SafetensorError):
            return None

    def save(self, name: str, state: dict[str, torch.Tensor]) -> None:
        """Write a state; it replaces the last one in one rename, so that a kill leaves one or the other."""
        temporary = self.folder / f".{name}.tmp"
        save_file({key: value.contiguous() for key, value in state.items()}, temporary)
        os.replace(temporary, self.folder / f"{name}.safetensors")
        self._last = time.monotonic()

    def save_sometimes(self, name: str, state: dict[str, torch.Tensor]) -> None:
        """Save if the last time is long enough ago."""
        if time.monotonic() - self._last > self.seconds:
            self.save(name, state)
