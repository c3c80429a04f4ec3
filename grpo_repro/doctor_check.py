"""One fact about the machine, as the doctor reports it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Check:
    """One fact about the machine.

    Attributes:
        name: What was looked at.
        ok: Whether it is as it should be.
        detail: What was found, and the remedy if it is not.
        needed: Whether the bundled job needs it.
    """

    name: str
    ok: bool
    detail: str
    needed: bool = True
