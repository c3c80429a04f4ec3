"""The folder in which the jobs of one command leave their outcomes and logs."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from grpo_repro.errors import UserError, cannot_write

_FINISHED = "finished"


@contextmanager
def job_folder(results_dir: str | None) -> Iterator[Path]:
    """Yield an empty folder and take it away afterwards, unless something in it is still needed.

    A sweep's lies in the results folder, where other machines see it too; if a job fails it stays, for its
    logs, until a later sweep succeeds. A lock beside it tells that its command is alive.

    Args:
        results_dir: Folder of the results for a sweep, None for a single job.

    Raises:
        ResultsError: If the results folder cannot be written.
    """
    if results_dir is None:
        with tempfile.TemporaryDirectory(prefix="grpo-", ignore_cleanup_errors=True) as name:
            yield Path(name)
        return
    folder = Path(results_dir).resolve() / ".launch" / uuid.uuid4().hex[:8]
    lock = _lock_path(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Locked before the folder is there: no other command sees the one without the other.
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        folder.mkdir()
    except OSError as error:
        with suppress(OSError):
            lock.unlink()
        for path in (folder.parent, folder.parent.parent):
            _remove_if_empty(path)
        raise cannot_write(folder.parent.parent, error) from error
    try:
        yield folder
    except UserError:
        # Every job's configuration is composed before the first starts: nothing has run.
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        _remove_if_empty(folder)
        if not folder.exists():
            lock.unlink(missing_ok=True)
        os.close(descriptor)
        for path in (folder.parent, folder.parent.parent):
            _remove_if_empty(path)


def keep_logs(folder: Path) -> None:
    """Note that no job of a folder is running or waiting any more: only its logs are kept."""
    (folder / _FINISHED).touch()


def discard(folder: Path) -> None:
    """Remove a folder in which workers that were interrupted too may still be writing their last lines."""
    for _ in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.05)


def discard_older(folder: Path) -> None:
    """Remove the folders beside one that no living command and no submitted job uses."""
    if folder.parent.name != ".launch":
        return
    for other in folder.parent.iterdir():
        submitted = (other / ".submitit").exists() and not (other / _FINISHED).exists()
        if other != folder and other.is_dir() and not submitted and _is_free(_lock_path(other)):
            shutil.rmtree(other, ignore_errors=True)
            _lock_path(other).unlink(missing_ok=True)


def _lock_path(folder: Path) -> Path:
    return folder.with_suffix(".lock")


def _is_free(lock: Path) -> bool:
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _remove_if_empty(path: Path) -> None:
    try:
        path.rmdir()
    except OSError:
        return
