"""One lock per cell, so that processes can share a results folder; a lock dies with its process."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo_repro.errors import ResultsError
from grpo_repro.results import CELL_ID


@contextmanager
def cell_lock(folder: Path, cell_id: str, wait: bool = False) -> Iterator[bool]:
    """Hold the lock of a cell while the block runs.

    The file goes when the lock is released. Whoever locked a file that is no longer the one on disk tries
    again, so two processes never hold the lock of two different files of one name.

    Args:
        folder: Folder of the experiment.
        cell_id: Id of the cell.
        wait: Whether to wait for another process, else give up at once.

    Yields:
        Whether the lock is held.

    Raises:
        ResultsError: If something else stands in its place, or it cannot be written.
    """
    path = folder / ".locks" / cell_id
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _acquire(path, wait)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ResultsError(f"cannot lock {path}: {reason}; move away what is there, or make it writable") from error
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            path.unlink(missing_ok=True)
            os.close(descriptor)


def _acquire(path: Path, wait: bool) -> int | None:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        try:
            on_disk = os.stat(path).st_ino
        except FileNotFoundError:
            on_disk = None
        if on_disk == os.fstat(descriptor).st_ino:
            return descriptor
        os.close(descriptor)


def clean_up(folder: Path) -> None:
    """Remove what processes that were cut off have left: half-written cells, partial work of finished ones.

    Args:
        folder: Folder of the experiment. What a live process holds the lock of is left alone.
    """
    half_written = [(path, path.name.removeprefix(".tmp-")[:12]) for path in folder.glob(".tmp-*")]
    done = [(path, path.name) for path in folder.glob(".work/*") if (folder / path.name).exists()]
    for path, cell_id in half_written + done:
        if CELL_ID.fullmatch(cell_id):
            with cell_lock(folder, cell_id) as held:
                if held:
                    shutil.rmtree(path, ignore_errors=True)
