"""Shared by all tests: run-time shape checks, one thread, no display, no network."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

# Before torch is imported anywhere: workers of pytest-xdist share the cores.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
os.environ["MPLBACKEND"] = "Agg"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Shapes and types of every annotated function, in tests only. Modules that were imported before (a plugin, a
# second conftest) stay as they are.
if not any(name == "grpo_repro" or name.startswith("grpo_repro.") for name in sys.modules):
    import jaxtyping

    jaxtyping.install_import_hook("grpo_repro", "beartype.beartype")

TESTS = Path(__file__).parent
sys.path.insert(0, str(TESTS / "fake"))


@pytest.fixture
def grpo(tmp_path):
    """Run `grpo` in an empty folder, as a user does, with the fake experiment of tests/fake."""
    from house import Command

    return Command(tmp_path)
