"""Errors that are the user's to mend."""

from __future__ import annotations


class UserError(Exception):
    """A bad argument, configuration or file; its message says the fact, the value and the remedy.

    The command line prints the message alone, without a traceback, and exits with status 2.
    """


class ResultsError(UserError):
    """The results folder cannot be used (a file, read-only, full disk): no further cell can succeed."""


class RunError(Exception):
    """A run failed for a reason that is not the configuration's; the command exits with status 1."""
