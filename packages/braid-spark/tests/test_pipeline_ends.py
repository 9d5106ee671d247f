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
from braid_spark.pipeline import build, runner, stopping
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


class Script:
    """What happens to a query from look to look: (does a trigger run, does a job of it write)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, query: Query, run: runner._Run, looks: list[tuple[bool, bool]]) -> None:
        self.query = query
        self.told: list[int] = []
        """At which looks the query was told to begin no more."""
        self.stopped: list[int] = []
        self._run = run
        self._looks = looks
        self._at = -1
        self._next()
        query.may_stop.set()
        monkeypatch.setattr(runner, "LastBatch", lambda *_: self)
        monkeypatch.setattr(run, "_take", self._take)
        monkeypatch.setattr(runner, "LAST_REPORT_SECONDS", 0)
        monkeypatch.setattr(query, "stop", self._stop)

    is_possible = True

    def tell(self) -> bool:
        if not self._looks[self._at][1]:
            return False
        self.told.append(self._at)
        self.query.isActive = False
        return True

    def _take(self, wait: float) -> None:
        if wait:
            self._run._history.count += 1  # a report that comes meanwhile may be that of the batch before
            self._next()

    def _next(self) -> None:
        self._at += 1
        self.query.status["isTriggerActive"] = self._looks[self._at][0]

    def _stop(self) -> None:
        self.stopped.append(self._at)
        self.query.isActive = False


PLANS, WRITES, IDLE = (True, False), (True, True), (False, False)


@pytest.mark.parametrize(
    ("looks", "told", "stopped"),
    [
        ([WRITES, WRITES, WRITES, IDLE], [0], 3),
        ([PLANS, PLANS, WRITES, PLANS, IDLE], [2], 4),
        ([PLANS, IDLE, IDLE, PLANS, WRITES, IDLE], [4], 5),
        ([IDLE] * 5, [], 4),
        ([PLANS, *[IDLE] * 4, PLANS, *[IDLE] * 5], [], 10),
    ],
    ids=[
        "while it writes",
        "while it is planned",
        "between two batches",
        "while nothing comes",
        "batches that are never seen to write",
    ],
)
def test_a_query_is_stopped_when_its_batch_has_ended(
    looks: list[tuple[bool, bool]], told: list[int], stopped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that is told before it writes is given up by Spark half way."""
    query, signals = Query(), runner._Signals()
    signals.count = 1
    run = following(query, signals)
    script = Script(monkeypatch, query, run, looks)
    run.follow()
    assert (script.told, script.stopped) == (told, [stopped])


def test_only_a_batch_that_writes_is_made_the_last() -> None:
    active: list[int] = []
    group: list[int] = []
    states: list[object] = []
    ended = object()
    names = SimpleNamespace(**{"TERMINATED$": SimpleNamespace(**{"MODULE$": ended})})
    for name in reversed(stopping.STATES.split(".")):
        names = SimpleNamespace(**{name: names})
    tracker = SimpleNamespace(getActiveJobsIds=lambda: active, getJobIdsForGroup=lambda run: group if run == "r" else [])
    spark: Any = SimpleNamespace(_jvm=names, sparkContext=SimpleNamespace(statusTracker=lambda: tracker))
    state = SimpleNamespace(set=states.append)
    query: Any = SimpleNamespace(runId="r", _jsq=SimpleNamespace(streamingQuery=lambda: SimpleNamespace(state=lambda: state)))
    last = stopping.LastBatch(spark, query)
    assert last.is_possible
    group[:] = [1]
    assert not last.tell() and not states, "its job has ended"
    active[:] = [2]
    assert not last.tell() and not states, "the job of another query"
    group[:] = [1, 2]
    assert last.tell() and states == [ended]
    other: Any = SimpleNamespace(runId="r", _jsq=SimpleNamespace())
    assert not stopping.LastBatch(spark, other).is_possible


def test_what_other_queries_of_the_session_do_does_not_matter() -> None:
    """Spark tells of their ends and of their batches as well, also of some that ended before."""
    run = following(Query(), runner._Signals())
    run._run_id = "own"
    run._run_ended("other")
    assert not run._ended.is_set()
    for name in ("other", "own"):
        run._reports.put({"runId": name, "batchId": 0, "timestamp": "2026-01-01T00:00:00.000Z", "sources": [], "sink": {}})
    run._take(wait=0)
    assert run._history.count == 1
    run._run_ended("own")
    assert run._ended.is_set()


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
