"""Records of a data set on disk: JSON lines, JSON and parquet files, folders of them; nothing is ever unpickled."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_repro.errors import UserError

SUFFIXES = (".jsonl", ".json", ".parquet")
LARGEST_BYTES = 2 * 2**30
MOST_FILES = 10**5
_BINARY = {
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
    b"\x80": "a pickle or another binary file",
    b"PK": "a zip archive",
    b"\x1f\x8b": "gzip-compressed",
}
FORMS = "JSON lines (.jsonl), JSON or parquet"


@dataclass(frozen=True)
class Record:
    """One row of a data file.

    Attributes:
        place: File and line (or row), for messages.
        key: The same relative to the data's folder: an id where the row has none.
        row: Its columns.
    """

    place: str
    key: str
    row: dict[str, Any]


def read(path: Path) -> dict[str, list[Record]]:
    """Read a file, or every data file of a folder.

    In a folder a file belongs to the split that its name or a folder above it begins with (`train.jsonl`,
    `test-00000-of-00001.parquet`, `train/algebra/1.json`); where none names a split all of them are one set.

    Args:
        path: File or folder.

    Returns:
        Records of `train` and `test`, or of "" where the data are one set.

    Raises:
        UserError: If there are no data, or they cannot be read; the message names file and line.
    """
    if not os.path.lexists(path):
        raise UserError(f"task.path={path} does not exist; give a file ({FORMS}) or a folder with train and test")
    if not path.is_dir():
        return {"": list(_file(path, path.name))}
    files = _files(path)
    found: dict[str, list[Record]] = {}
    for file in files:
        found.setdefault(_split(file.relative_to(path)), []).extend(_file(file, str(file.relative_to(path))))
    named = {split: rows for split, rows in found.items() if split}
    return named or found


def _files(folder: Path) -> list[Path]:
    files: list[Path] = []
    for parent, folders, names in os.walk(folder):  # which does not follow links to folders
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files += [Path(parent, name) for name in names if name.endswith(SUFFIXES) and not name.startswith(".")]
        if len(files) > MOST_FILES:
            raise UserError(
                f"task.path={folder} holds more than {MOST_FILES} data files; give the data set's own folder"
            )
    if not files:
        shown = ", ".join(sorted(item.name for item in folder.iterdir())[:5]) or "nothing"
        raise UserError(
            f"task.path={folder} holds no data files ({shown}); it needs train and test as {FORMS}, or folders of JSON "
            "files train/ and test/"
        )
    return sorted(files)


def _split(path: Path) -> str:
    for part in path.parts:
        for split in ("train", "test"):
            if part.lower().startswith(split) and not part.lower()[len(split) : len(split) + 1].isalpha():
                return split
    return ""


def _file(path: Path, name: str) -> Iterator[Record]:
    """Yield the records of one file."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{path} is no regular file; give {FORMS}")
        if status.st_size > LARGEST_BYTES:
            raise UserError(f"{path} has {status.st_size:,} bytes; a data file has {LARGEST_BYTES:,} at most")
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}; give {FORMS}") from error
    if not data.strip():
        raise UserError(f"{path} is empty; give {FORMS}")
    rows = _parquet(path) if data.startswith(b"PAR1") or path.suffix == ".parquet" else _text(path, data)
    for place, row in rows:
        if not isinstance(row, dict):
            raise UserError(f"{path}{place} is no JSON object but {json.dumps(row)[:60]}; mend it")
        yield Record(f"{path}{place}", f"{name}{place}", row)


def _text(path: Path, data: bytes) -> Iterator[tuple[str, Any]]:
    for magic, what in _BINARY.items():
        if data.startswith(magic):
            raise UserError(f"{path} is {what}; save it as UTF-8 {FORMS}")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8") from error
    if "\0" in text[:1000]:
        raise UserError(f"{path} is binary or UTF-16 text; save it as UTF-8 {FORMS}")
    if path.suffix == ".json":
        try:
            whole = json.loads(text, parse_constant=_constant)
        except (ValueError, RecursionError) as error:
            if "\n{" not in text.strip():
                raise UserError(f"{path} is not JSON ({_reason(error)}); mend the file") from error
        else:
            yield from ((f":{i}", row) for i, row in enumerate(whole, 1)) if isinstance(whole, list) else [("", whole)]
            return
    # Only \n ends a line: other characters that str.splitlines knows may stand inside of JSON text.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield f":{number}", json.loads(line, parse_constant=_constant)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path}:{number} is not JSON ({_reason(error)}); mend or remove that line") from error


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


def _reason(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = pq.read_table(path).to_pylist()
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or ["no message"])[0]
        raise UserError(f"{path} is not readable parquet ({reason[:120]}); save it again") from error
    if not rows:
        raise UserError(f"{path} is empty: it has no rows; give {FORMS}")
    yield from ((f":{number}", row) for number, row in enumerate(rows, 1))
