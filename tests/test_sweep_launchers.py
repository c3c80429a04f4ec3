"""Real training sweeps as processes: launchers, a faked SLURM, failures, shared folders, kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from house import TRACEBACK, Command

pytestmark = pytest.mark.slow

SWEEP = [
    "sweep", "group-size", "iterations=8", "checkpoints=[0]", "group_sizes=[2,4]", "budget=8", "eval_samples=2",
    "task.num_questions=5", "prompt_pool=10", "predict_seeds=[]", "save_seconds=0",
]  # fmt: skip
LABELS = [f"bundled-base N=8 G={group} seed {seed}" for seed in (0, 1) for group in (2, 4)]
MIDDLE = 4

WATCH = '''
"""In every process: note each iteration of each cell; fail at one that is named, or stand still there once."""
import os, signal
from pathlib import Path
from grpo_repro.experiments import training

stopped = Path(os.environ["WATCH_STOPPED"])

def watched(cell, workdir, progress, run=training.run):
    def noted(done, total, what):
        here = f"{cell.label}: {done}"
        with open(os.environ["WATCH_LOG"], "a") as log:
            log.write(here + "\\n")
        if os.environ.get("WATCH_FAIL") == here:
            raise RuntimeError("out of memory")
        if os.environ.get("WATCH_STOP") == here and not stopped.exists():
            stopped.write_text(str(os.getpid()))
            signal.pause()
        progress(done, total, what)
    return run(cell, workdir, noted)

training.run = watched
'''

SLURM = {
    "sbatch": """
cp "$1" "$SLURM_FAKE/script.sh"
tasks=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\)%.*/\\1/p' "$1")
for task in $(seq 0 "$tasks"); do
  SLURM_JOB_ID=$((4242 + task)) SLURM_ARRAY_JOB_ID=4242 SLURM_ARRAY_TASK_ID=$task SLURM_NTASKS=1 \\
    SLURM_JOB_NUM_NODES=1 SLURM_NODEID=0 SLURM_JOB_NODELIST=node1 \\
    setsid bash "$1" < /dev/null > /dev/null 2>&1 &
done
echo "Submitted batch job 4242"
""",
    "srun": """
while [ "${1#--}" != "$1" ]; do
  case "$1" in
    --output) out=$2; shift 2;;
    --error) err=$2; shift 2;;
    *) shift;;
  esac
done
named() { echo "$1" | sed "s/%A/$SLURM_ARRAY_JOB_ID/g; s/%a/$SLURM_ARRAY_TASK_ID/g; s/%t/0/g"; }
export SLURM_PROCID=0 SLURM_LOCALID=0
mkdir -p "$(dirname "$(named "$out")")"
exec "$@" > "$(named "$out")" 2> "$(named "$err")"
""",
    "sacct": """
echo "JobID|State|NodeList"; echo "4242_0|RUNNING|node1"; echo "4242_1|RUNNING|node1"
""",
    "scontrol": """
echo "$@" >> "$SLURM_FAKE/asked"
setsid bash "$SLURM_FAKE/script.sh" < /dev/null > /dev/null 2>&1 &
""",
    "scancel": "",
    "squeue": "",
}
"""What stands in for a cluster: jobs run here at once, with the variables that SLURM would set."""


class Sweep(Command):
    """The sweep in an empty folder, every process watched; no experiment is replaced."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        hook = folder / "hook"
        hook.mkdir(parents=True)
        (hook / "sitecustomize.py").write_text(WATCH)
        self.log = hook / "log"
        self.log.touch()
        self.started: list[subprocess.Popen[str]] = []
        self.stopped = hook / "stopped"
        self.environment |= {"PYTHONPATH": str(hook), "WATCH_LOG": str(self.log), "WATCH_STOPPED": str(self.stopped)}

    def start(self, *arguments, **environment):
        self.started.append(super().start(*arguments, **environment))
        return self.started[-1]

    def kill(self, process):
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL

    def rows(self):
        """Bytes of every cell's rows by cell id; whatever else is left in the results folder is an error."""
        files = [path for path in (self.folder / "results").rglob("*") if path.is_file()]
        cells = {path.parent for path in files if path.name == "metrics.parquet"}
        wanted = {cell / name for cell in cells for name in ("config.yaml", "manifest.json", "metrics.parquet")}
        assert set(files) == wanted
        return {cell.name: (cell / "metrics.parquet").read_bytes() for cell in cells}

    def times_run(self):
        """How often each cell has begun its first iteration and has gone through its last."""
        lines = self.log.read_text().splitlines()
        return [[lines.count(f"{label}: {iteration}") for label in LABELS] for iteration in (1, 8)]

    def stop_at(self, label, *arguments):
        """Start the sweep and wait until it stands still in the middle of a cell."""
        process = self.start(*SWEEP, *arguments, WATCH_STOP=f"{label}: {MIDDLE}")
        deadline = time.monotonic() + 100
        while not (self.stopped.exists() and self.stopped.read_text()):
            assert process.poll() is None and time.monotonic() < deadline, process.communicate(timeout=1)
            time.sleep(0.02)
        return process


@pytest.fixture
def sweep(tmp_path):
    made = Sweep(tmp_path)
    yield made
    for process in made.started:
        if process.poll() is None:
            made.kill(process)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Rows of the sweep in one process, without a launcher."""
    alone = Sweep(tmp_path_factory.mktemp("plain"))
    run = alone(*SWEEP, "seeds=[0,1]", "--json")
    assert run.returncode == 0, run.stderr
    rows = alone.rows()
    assert len(rows) == 4
    assert len(set(rows.values())) == 4
    assert sorted(rows) == sorted(json.loads(run.stdout)["cells"])
    return rows


def succeeded(run, rows, plain):
    assert run.returncode == 0, run.stderr
    assert TRACEBACK not in run.stderr
    assert sorted(json.loads(run.stdout)["cells"]) == sorted(plain)
    assert rows == plain


# -- launchers


@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_a_launcher_gives_the_rows_of_one_process(sweep, plain, launcher):
    run = sweep(*SWEEP, "-m", "--json", "seeds=[0],[1]", f"hydra/launcher={launcher}")
    succeeded(run, sweep.rows(), plain)
    assert sweep.times_run() == [[1, 1, 1, 1]] * 2


def test_ray_gives_the_rows_of_one_process(sweep, plain):
    pytest.importorskip("hydra_plugins.hydra_ray_launcher", reason="hydra-ray-launcher is not installed")
    run = sweep(*SWEEP, "-m", "--json", "seeds=[0],[1]", "hydra/launcher=ray")
    succeeded(run, sweep.rows(), plain)
    assert sweep.times_run() == [[1, 1, 1, 1]] * 2


def slurm(folder):
    """Environment in which a cluster seems to be there."""
    folder.mkdir()
    for name, script in SLURM.items():
        (folder / name).write_text("#!/bin/bash\n" + script)
        (folder / name).chmod(0o755)
    return {"SLURM_FAKE": str(folder), "PATH": f"{folder}:{os.environ['PATH']}"}


def test_slurm_gets_the_job_that_was_asked_for_and_a_preempted_job_goes_on(sweep, plain):
    fake = sweep.folder / "slurm"
    sweep.environment |= slurm(fake)
    asked = ["partition=gpu", "gpus_per_node=1", "timeout_min=90", "cpus_per_task=4", "mem_gb=16", "account=lab"]
    settings = [f"hydra.launcher.{item}" for item in asked]
    process = sweep.stop_at(LABELS[1], "-m", "--json", "seeds=[0],[1]", "hydra/launcher=submitit_slurm", *settings)
    lines = (fake / "script.sh").read_text().splitlines()
    options = dict(line.removeprefix("#SBATCH --").split("=", 1) for line in lines if line.startswith("#SBATCH "))
    expected = {
        "partition": "gpu", "gpus-per-node": "1", "time": "90", "cpus-per-task": "4", "mem": "16GB", "account": "lab",
        "nodes": "1", "ntasks-per-node": "1", "array": "0-1%2", "signal": "USR2@120",
    }  # fmt: skip
    assert {key: options.get(key) for key in expected} == expected
    # Every machine of a cluster sees the results folder, and only that.
    assert options["output"].startswith(str(sweep.folder / "results" / ".launch"))
    (command,) = [line for line in lines if line.startswith("srun ")]
    assert f"{sys.executable} -u -m submitit.core._submit {sweep.folder / 'results' / '.launch'}" in command

    os.kill(int(sweep.stopped.read_text()), signal.SIGUSR2)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert json.loads(out)["rows"] == 48
    assert (fake / "asked").read_text() == "requeue 4242_0\n"
    assert sweep.rows() == plain
    # Only the iteration in which it was stopped was begun again.
    assert sweep.times_run() == [[1, 1, 1, 1]] * 2


def test_a_cell_that_fails_is_reported_at_once_and_the_rest_goes_on(sweep, plain):
    arguments = ["-m", "--json", "seeds=[0],[1]"]
    run = sweep(*SWEEP, *arguments, "hydra/launcher=joblib", WATCH_FAIL=f"{LABELS[0]}: {MIDDLE}")
    assert run.returncode == 1, run.stderr
    assert TRACEBACK not in run.stderr
    found = json.loads(run.stdout)
    ((failed, reason),) = found["failures"].items()
    assert (len(found["cells"]), reason) == (4, "RuntimeError: out of memory")
    lines = run.stderr.splitlines()
    report = f"{LABELS[0]} ({failed}): RuntimeError: out of memory (traceback in "
    (reported,) = [i for i, line in enumerate(lines) if report in line]
    (next_done,) = [i for i, line in enumerate(lines) if line.startswith(f"{LABELS[1]}: done")]
    assert reported < next_done
    done = {path.parent.name for path in (sweep.folder / "results" / "group-size").glob("*/metrics.parquet")}
    assert done == set(plain) - {failed}
    again = sweep(*SWEEP, *arguments)
    succeeded(again, sweep.rows(), plain)
    # The cell went on behind the last iteration that it had saved, and no other cell was run again.
    assert sweep.times_run() == [[1, 1, 1, 1]] * 2


# -- processes that share a folder, and processes that die


def test_two_processes_at_once_share_the_work(sweep, plain):
    both = [sweep.start(*SWEEP, "seeds=[0,1]", "--json") for _ in range(2)]
    for process in both:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert json.loads(out)["rows"] == 48
    assert sweep.rows() == plain
    assert sweep.times_run() == [[1, 1, 1, 1]] * 2


def test_one_of_two_processes_is_killed_and_the_other_finishes_its_cell(sweep, plain):
    victim = sweep.stop_at(LABELS[1], "seeds=[0,1]")
    other = sweep.start(*SWEEP, "seeds=[0,1]", "--json")
    waiting = f"{LABELS[1]}: another process is running it; waiting for it\n"
    assert waiting in iter(other.stderr.readline, "")
    assert other.poll() is None
    sweep.kill(victim)
    out, err = other.communicate(timeout=120)
    assert other.returncode == 0, err
    assert json.loads(out)["rows"] == 48
    assert sweep.rows() == plain
    assert sweep.times_run() == [[1, 1, 1, 1]] * 2


def test_a_killed_sweep_goes_on_from_where_it_was(sweep, plain):
    victim = sweep.stop_at(LABELS[1], "seeds=[0,1]")
    sweep.kill(victim)
    (first,) = (sweep.folder / "results" / "group-size").glob("*/metrics.parquet")
    before = first.stat().st_mtime_ns
    sweep.log.write_text("")
    again = sweep(*SWEEP, "seeds=[0,1]", "--json")
    succeeded(again, sweep.rows(), plain)
    assert "group-size: 3 of 4 cells to run" in again.stderr
    assert first.stat().st_mtime_ns == before
    assert sweep.log.read_text().splitlines()[0] == f"{LABELS[1]}: {MIDDLE}"
    assert sweep.times_run() == [[0, 0, 1, 1], [0, 1, 1, 1]]
    idle = sweep(*SWEEP, "seeds=[0,1]", "--json")
    succeeded(idle, sweep.rows(), plain)
    assert "group-size: all 4 cells are finished already" in idle.stderr
