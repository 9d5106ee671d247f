"""How a pipeline ends when somebody is impatient, and what is said of a checkpoint that nothing can go on from."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from braid.errors import ConfigError
from braid.runtime.clock import SystemClock
from braid_spark.pipeline import build, runner
from braid_spark.pipeline.checkpoint import check_checkpoint
from braid_spark.pipeline.failures import PipelineFailed
from braid_spark.pipeline.history import History
from braid_spark.pipeline.screen import Screen
from braid_spark.pipeline.spec import parse

PIPELINE = parse(b"{name: p, source: {options: {topic: a}}, sink: {options: {topic: b}}, checkpoint: c}", Path("p.yaml"))


class Query:
    """One whose batch never ends, and which does not stop either."""

    def __init__(self) -> None:
        self.isActive = True
        self.status = {"isTriggerActive": True, "message": "Processing new data"}
        self.is_asked_to_stop = threading.Event()
        self.may_stop = threading.Event()

    def stop(self) -> None:
        self.is_asked_to_stop.set()
        self.may_stop.wait()
        self.isActive = False

    def exception(self) -> None:
        return None


def following(query: Query, signals: runner._Signals) -> runner._Run:
    history = History("p", 0)
    streams = SimpleNamespace(removeListener=lambda _listener: None)
    spark: Any = SimpleNamespace(streams=streams)
    run = runner._Run(spark, PIPELINE, history, Screen(history), SystemClock(), signals, None)
    stand_in: Any = query
    run._query = stand_in
    return run


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "LOOK_SECONDS", 0.01)


def test_a_signal_before_the_query_runs_ends_the_command() -> None:
    with runner._Signals(), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_java_that_is_being_started_is_not_left_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def launch(*_asked: object) -> Any:
        started.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        os.kill(os.getpid(), signal.SIGINT)
        return SimpleNamespace(proc=started[0])

    monkeypatch.setattr("pyspark.java_gateway.launch_gateway", launch)
    monkeypatch.setattr("braid_spark.java.ensure_java", lambda: None)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("PYTHONPATH", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    with runner._Signals() as signals, (tmp_path / "log").open("wb") as log, pytest.raises(KeyboardInterrupt):
        build.open_session(PIPELINE, log, signals.held)
    assert [each.returncode for each in started] == [-signal.SIGKILL]
    started[0].communicate()


@pytest.mark.usefixtures("quick")
def test_the_second_signal_waits_for_nothing() -> None:
    query, signals = Query(), runner._Signals()
    signals.count = 2
    following(query, signals).follow()
    assert not query.is_asked_to_stop.is_set()


@pytest.mark.usefixtures("quick")
def test_a_query_that_begins_no_more_is_stopped_when_its_batch_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report that comes meanwhile may be that of the batch before."""
    query, signals = Query(), runner._Signals()
    query.may_stop.set()
    signals.count = 1
    run = following(query, signals)
    seen: list[str] = []

    def tell(*_asked: object) -> bool:
        seen.append("told")
        query.isActive = False
        return True

    def take(wait: float) -> None:
        if wait:
            seen.append("stopped" if query.is_asked_to_stop.is_set() else "running")
            run._history.count += 1
            query.status["isTriggerActive"] = len(seen) < 4

    monkeypatch.setattr(runner, "begin_no_more", tell)
    monkeypatch.setattr(run, "_take", take)
    monkeypatch.setattr(runner, "LAST_REPORT_SECONDS", 0)
    run.follow()
    assert seen == ["told", "running", "running", "running", "running"], "the last look is behind the batch, to be sure of it"
    assert query.is_asked_to_stop.is_set()


def test_a_batch_that_was_about_to_begin_is_let_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark had looked whether it may go on, and had not said yet that it does."""
    query, signals = Query(), runner._Signals()
    query.may_stop.set()
    query.status["isTriggerActive"] = False
    signals.count = 1
    run = following(query, signals)
    looks: list[bool] = []

    def tell(*_asked: object) -> bool:
        query.isActive = False
        return True

    def take(wait: float) -> None:
        if wait:
            looks.append(query.is_asked_to_stop.is_set())
            query.status["isTriggerActive"] = len(looks) < 3

    monkeypatch.setattr(runner, "begin_no_more", tell)
    monkeypatch.setattr(run, "_take", take)
    monkeypatch.setattr(runner, "LAST_REPORT_SECONDS", 0)
    run.follow()
    assert looks == [False] * 4, "one before the batch, two in it, one behind it"
    assert query.is_asked_to_stop.is_set()


@pytest.mark.usefixtures("quick")
def test_a_query_that_does_not_stop_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "STOP_SECONDS", 0.05)
    query, signals = Query(), runner._Signals()
    query.status["isTriggerActive"] = False
    signals.count = 1
    run = following(query, signals)
    run.follow()
    assert query.is_asked_to_stop.is_set() and query.isActive
    query.may_stop.set()


@pytest.mark.usefixtures("quick")
def test_what_stopping_raises_is_raised() -> None:
    def fail() -> None:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        runner.in_time(fail, runner._Signals())


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.usefixtures("quick")
def test_java_is_ended_if_it_does_not_stop(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once after the second signal, else when it had its time."""
    monkeypatch.setattr(runner, "STOP_SECONDS", 0.05)
    never = threading.Event()
    java = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    context = SimpleNamespace(_gateway=SimpleNamespace(proc=java))
    spark: Any = SimpleNamespace(sparkContext=context, stop=never.wait)
    signals = runner._Signals()
    signals.count = count
    try:
        runner._end(spark, signals)
        assert java.returncode == -signal.SIGKILL
    finally:
        never.set()
        java.communicate()


@pytest.mark.usefixtures("quick")
def test_a_stop_that_loses_its_java_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second Ctrl-C comes while Spark stops: PySpark would warn of a Java that may have crashed."""
    monkeypatch.setattr(runner, "STOP_SECONDS", 0.05)
    java = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    is_stopped = threading.Event()

    def stop() -> None:
        java.wait()
        warnings.warn("Unable to cleanly shutdown Spark JVM process. It may have crashed.", RuntimeWarning, stacklevel=1)
        is_stopped.set()

    spark: Any = SimpleNamespace(sparkContext=SimpleNamespace(_gateway=SimpleNamespace(proc=java)), stop=stop)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        runner._end(spark, runner._Signals())
        assert is_stopped.wait(20)
    java.communicate()
    assert not said


def test_spark_s_log_is_kept_and_named_if_the_query_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = tmp_path / "spark.log"
    monkeypatch.setattr(build, "log_file", lambda _pipeline: log)
    monkeypatch.setattr(build, "open_session", lambda *_asked: None)
    monkeypatch.setattr(runner, "_end", lambda _spark, _signals: None)
    with runner._session(PIPELINE, runner._Signals()):
        pass
    assert not log.exists()
    with pytest.raises(PipelineFailed) as caught, runner._session(PIPELINE, runner._Signals()):
        raise PipelineFailed("It failed.")
    assert caught.value.message == f"It failed. (Spark's log: {log})" and log.exists()


@pytest.mark.parametrize(("away", "says"), [("source", "cannot be read"), ("sink", "cannot be written to")])
def test_a_broker_that_is_away_is_told_before_spark_starts(away: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_session", lambda *_asked: pytest.fail("Spark was started"))
    other = {"source": "sink", "sink": "source"}[away]
    endpoints = {away: "{options: {topic: a}}", other: "{format: rate}" if other == "source" else "{format: noop}"}
    text = f"{{name: p, source: {endpoints['source']}, sink: {endpoints['sink']}, checkpoint: c}}"
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and never listens
        url = f"pulsar://127.0.0.1:{nobody.getsockname()[1]}"
        with pytest.raises(PipelineFailed) as caught:
            pipeline = parse(text.encode(), Path("p.yaml"))
            runner.run_pipeline(pipeline, url=url, is_to_the_end=True, dashboard=None, is_json=True)
    assert caught.value.message.startswith(f"The {away} of p {says}: Cannot connect to {url.partition('//')[2]}: ")


OFFSET = 'v1\n{"batchWatermarkMs":0}\n{"v":1,"topics":{}}'
COMMIT = 'v1\n{"nextBatchWatermarkMs":0}'


def checkpoint(folder: Path) -> Path:
    (folder / "offsets").mkdir(parents=True)
    (folder / "commits").mkdir()
    (folder / "metadata").write_text('{"id":"1"}')
    for batch in (8, 9, 10):
        (folder / "offsets" / str(batch)).write_text(OFFSET)
    for batch in (8, 9):
        (folder / "commits" / str(batch)).write_text(COMMIT)
    (folder / "offsets" / ".10.crc").write_bytes(b"crc")
    return folder


def test_a_checkpoint_that_is_whole_or_not_there_or_elsewhere(tmp_path: Path) -> None:
    check_checkpoint(str(tmp_path / "none"))
    check_checkpoint("s3a://bucket/state")
    check_checkpoint(str(checkpoint(tmp_path / "state")))
    (tmp_path / "state" / "offsets" / "8").write_text("")  # nothing goes on from there any more
    check_checkpoint(f"file://{tmp_path}/state")
    (tmp_path / "state" / "offsets" / "11").write_text(OFFSET.rpartition("\n")[0] + "\n-")  # a source without an offset
    check_checkpoint(str(tmp_path / "state"))


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("offsets/10", OFFSET[:-4], "its file offsets/10 is not whole"),
        ("offsets/9", OFFSET[:-4], "its file offsets/9 is not whole"),
        ("offsets/10", OFFSET[:26], "its file offsets/10 ends too early"),
        ("offsets/10", "", "its file offsets/10 is empty"),
        ("offsets/10", "abc", "its file offsets/10 does not begin with a version"),
        ("commits/9", COMMIT[:-1], "its file commits/9 is not whole"),
        ("commits/9", "v1", "its file commits/9 ends too early"),
        ("metadata", '{"id"', "its file metadata is not whole"),
    ],
)
def test_a_file_that_is_not_whole_is_named(tmp_path: Path, name: str, text: str, says: str) -> None:
    folder = checkpoint(tmp_path / "state")
    (folder / name).write_text(text)
    with pytest.raises(ConfigError) as caught:
        check_checkpoint(f"file:{folder}" if name == "metadata" else str(folder))
    assert says in caught.value.message and "Restore the checkpoint from a copy" in caught.value.message


def test_a_checkpoint_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        check_checkpoint(str(tmp_path / "state"))
