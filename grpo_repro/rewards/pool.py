"""A small pool of processes that ask math-verify, each killed and replaced when it passes its deadline."""

from __future__ import annotations

import atexit
import json
import os
import queue
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from grpo_repro.errors import UserError
from grpo_repro.rewards import Verdict

START_SECONDS = 120.0
"""Longest start of a worker: imports on a busy machine, which no completion is to be charged with."""

MOST_WORKERS = 4


class Pool:
    """Workers that are started when first needed and reused.

    Args:
        deadline: Seconds for one comparison.
        size: Number of workers; by default one for each core, four at most.
    """

    def __init__(self, deadline: float, size: int | None = None) -> None:
        self.deadline = deadline
        self.size = size or max(1, min(MOST_WORKERS, os.cpu_count() or 1))
        self.owner = os.getpid()
        # A place holds a worker, or None where one has still to be started.
        self._places: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        self._started: set[_Worker] = set()
        for _ in range(self.size):
            self._places.put(None)

    def compare(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        """Compare answers with golds, several at once; any thread may call.

        Args:
            pairs: Answer and gold of each comparison.

        Returns:
            Their verdicts in order: `right`, `wrong`, `gold_unparsable`, or `error` (a time-out included).

        Raises:
            UserError: If math-verify is not installed or cannot start.
        """
        if len(pairs) < 2 or self.size == 1:
            return [self._one(*pair) for pair in pairs]
        with ThreadPoolExecutor(min(self.size, len(pairs))) as threads:
            return list(threads.map(lambda pair: self._one(*pair), pairs))

    def _one(self, answer: str, gold: str) -> Verdict:
        worker = self._places.get()
        try:
            if worker is None:
                worker = _Worker(self.deadline)
                self._started.add(worker)
            verdict = worker.ask(answer, gold, self.deadline)
        finally:
            if worker is not None and not worker.alive:
                self._started.discard(worker)
                worker = None
            self._places.put(worker)
        return verdict

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that live."""
        return [worker.process.pid for worker in list(self._started)]

    def close(self) -> None:
        """End all workers."""
        for worker in list(self._started):
            worker.kill()
        self._started.clear()


class _Worker:
    """One process; `alive` is False once it has been killed."""

    def __init__(self, deadline: float) -> None:
        if find_spec("math_verify") is None:
            raise UserError(
                "math answers that differ as text are compared by math-verify, which is not installed; "
                "pip install math-verify"
            )
        package = str(Path(__file__).resolve().parents[2])
        paths = [path for path in sys.path if path]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths + [package] * (package not in paths))}
        command = [sys.executable, "-P", "-m", "grpo_repro.rewards.worker", str(deadline)]
        self.alive = True
        self._buffer = b""
        with tempfile.TemporaryFile() as messages:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=messages, bufsize=0, env=environment
            )
            try:
                started = self._line(START_SECONDS)
            except BaseException:
                self.kill()
                raise
            if started != b"ready":
                self.kill()
                messages.seek(0)
                last = messages.read().decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
                raise UserError(
                    f"the process of math-verify does not start ({last[0]}); try: python -c 'import math_verify', "
                    "and install grpo-repro again if that fails"
                )

    def ask(self, answer: str, gold: str, deadline: float) -> Verdict:
        """Compare; a worker that is late, dies or is interrupted is killed."""
        assert self.process.stdin is not None
        line: bytes | None = None
        try:
            self.process.stdin.write(json.dumps({"answer": answer, "gold": gold}).encode() + b"\n")
            line = self._line(deadline)
        except OSError:
            line = b""
        finally:
            if not line:
                self.kill()
        if line is None:
            return Verdict("error", f"no verdict within {deadline:g} s")
        if not line:
            return Verdict("error", "the process of math-verify died")
        return Verdict(**json.loads(line))

    def _line(self, seconds: float) -> bytes | None:
        """Read a line; None at the deadline, empty at the end of the stream."""
        assert self.process.stdout is not None
        end = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                return None
            chunk = os.read(self.process.stdout.fileno(), 65536)
            if not chunk:
                return b""
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def kill(self) -> None:
        """End the process and wait until it is gone."""
        self.alive = False
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


_pools: dict[float, Pool] = {}
_lock = threading.Lock()


def shared(deadline: float) -> Pool:
    """The pool of this process with a given deadline; a forked child gets its own."""
    with _lock:
        pool = _pools.get(deadline)
        if pool is None or pool.owner != os.getpid():
            pool = _pools[deadline] = Pool(deadline)
        return pool


@atexit.register
def _close_all() -> None:
    for pool in _pools.values():
        if pool.owner == os.getpid():
            pool.close()
