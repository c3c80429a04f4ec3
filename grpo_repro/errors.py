"""Errors that are the user's to mend."""

from __future__ import annotations

import errno
from pathlib import Path

FULL_DISK = (errno.ENOSPC, errno.EDQUOT)


class UserError(Exception):
    """A bad argument, configuration or file; its message says the fact, the value and the remedy.

    The command line prints the message alone, without a traceback, and exits with status 2.
    """


class NotHere(UserError):
    """Data that are neither on this machine nor within its reach; a dry run goes on without them."""


class ResultsError(UserError):
    """The results folder cannot be used (a file, read-only, full disk): no further cell can succeed."""


class NotFinite(UserError):
    """A policy's logits are not finite."""


class RunError(Exception):
    """A run failed for a reason that is not the configuration's; the command exits with status 1."""


def cannot_write(folder: str | Path, error: OSError) -> ResultsError:
    """Return the message for a folder of results that cannot be written."""
    reason = error.strerror or str(error)
    remedy = "free space or name" if error.errno in FULL_DISK else "name"
    return ResultsError(
        f"cannot write results to {folder}: {reason}; {remedy} another folder with results_dir=DIR "
        "(finished cells and partial work are kept)"
    )
