"""Run the command line in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FAKE = Path(__file__).parent
TRACEBACK = "Traceback (most recent call last)"


def message(run):
    """The one message of a command that refused its arguments."""
    assert run.returncode == 2, run
    assert run.stdout == ""
    assert TRACEBACK not in run.stderr
    lines = run.stderr.strip().splitlines()
    assert len(lines) == 1, run.stderr
    assert lines[0].startswith("error: ")
    return lines[0]


class Command:
    """The command `grpo` in a folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.environment = os.environ | {"PYTHONPATH": str(FAKE), "PYTHONWARNINGS": "default::UserWarning"}

    def _arguments(self, arguments):
        return [sys.executable, "-m", "grpo_repro.cli", *map(str, arguments)]

    def __call__(self, *arguments, **environment):
        return subprocess.run(
            self._arguments(arguments),
            cwd=self.folder,
            env=self.environment | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def start(self, *arguments, **environment):
        return subprocess.Popen(
            self._arguments(arguments),
            cwd=self.folder,
            env=self.environment | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def files(self):
        """Everything in the folder, hidden or not, less the locks' empty folder."""
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file())
