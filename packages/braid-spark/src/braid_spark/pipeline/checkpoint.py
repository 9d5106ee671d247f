"""A checkpoint on this machine, looked at before Spark starts: are the files whole that a query goes on from?

Spark and its Python runner read these files themselves and name none of them when one is cut off. Owns that look alone: what an
offset means is the source's business, and nothing is ever written or repaired here. Checkpoints elsewhere (`s3a://...`) are
left to Spark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from braid.errors import ConfigError


def check_checkpoint(checkpoint: str) -> None:
    """Raises ConfigError, with the file and what to do, if Spark could not go on from here."""
    folder = _local(checkpoint)
    if folder is None or not folder.exists():
        return
    if not folder.is_dir():
        raise ConfigError(f"The checkpoint {checkpoint} is a file; name a directory, which need not exist yet.")
    for file, whats_wrong in _damages(folder):
        raise ConfigError(
            f"The checkpoint {checkpoint} is damaged: its file {file.relative_to(folder)} {whats_wrong}. Restore the "
            "checkpoint from a copy, or name a new one, with which the query starts anew."
        )


def _damages(folder: Path) -> Iterator[tuple[Path, str]]:
    metadata = folder / "metadata"
    if metadata.exists() and (wrong := _wrong_json(_text(metadata))):
        yield metadata, wrong
    # The batch to go on with, and the one before it, where that begins.
    for file in _numbered(folder / "offsets")[-2:]:
        if wrong := _wrong_log(_text(file), at_least=2):
            yield file, wrong
    for file in _numbered(folder / "commits")[-1:]:
        if wrong := _wrong_log(_text(file), at_least=1):
            yield file, wrong


def _local(checkpoint: str) -> Path | None:
    if found := re.match(r"file:(?://(?=/))?", checkpoint):
        return Path(checkpoint[found.end() :])
    return None if re.match(r"[A-Za-z][\w+.-]*:", checkpoint) else Path(checkpoint)


def _numbered(folder: Path) -> list[Path]:
    """The files of a log of Spark's, by batch."""
    if not folder.is_dir():
        return []
    return sorted((each for each in folder.iterdir() if each.name.isdecimal()), key=lambda each: int(each.name))


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError as error:
        raise ConfigError(f"The checkpoint's file {file} cannot be read: {error.strerror or error}.") from error


def _wrong_log(text: str, at_least: int) -> str | None:
    """What is wrong with a file of a log: a version, then lines, most of them JSON."""
    version, *lines = text.splitlines() or [""]
    if not re.fullmatch(r"v\d+", version):
        return "is empty" if not text.strip() else "does not begin with a version"
    if len(lines) < at_least or not lines[-1]:
        return "ends too early"
    return next(filter(None, (_wrong_json(line) for line in lines if line.startswith(("{", "[")))), None)


def _wrong_json(text: str) -> str | None:
    if not text.strip():
        return "is empty"
    try:
        json.loads(text)
    except ValueError:
        return "is not whole"
    return None
