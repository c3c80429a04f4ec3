"""Data and cases that lie beside the checkout (`../shared`); tests that need them are skipped where they are absent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parent.parent.parent / "shared"
GSM8K, MATH = SHARED / "data" / "gsm8k", SHARED / "data" / "math"
CASES = SHARED / "cases" / "rewards.jsonl"

needs_data = pytest.mark.skipif(not (GSM8K.is_dir() and MATH.is_dir()), reason=f"no data sets in {SHARED / 'data'}")
needs_cases = pytest.mark.skipif(not CASES.is_file(), reason=f"no {CASES}")


def lines(path: Path) -> list[dict]:
    """Rows of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
