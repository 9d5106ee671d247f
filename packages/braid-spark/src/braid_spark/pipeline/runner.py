"""`braid pipeline run` and `check`: starts the query, follows it, ends it, says what it did.

Spark reports each committed batch to a listener on a thread of its own; the main thread shows it and looks after signals. The
first Ctrl-C or SIGTERM lets the running batch come to its end and no other begin, so that no transaction of the sink is left
open for others to wait behind; the second ends Spark's processes without asking them, because what does not answer cannot be
asked. Before the query runs there is nothing to wait for, and the first one ends the command.
"""

from __future__ import annotations

import json
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from braid.runtime.clock import SystemClock
from braid_spark.pipeline import build
from braid_spark.pipeline.checkpoint import check_checkpoint
from braid_spark.pipeline.dashboard import write_picture
from braid_spark.pipeline.failures import PipelineFailed, is_java_gone, sentence
from braid_spark.pipeline.history import History
from braid_spark.pipeline.screen import Screen, summary_lines
from braid_spark.pipeline.spec import Pipeline
from braid_spark.pipeline.stopping import LastBatch

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

LOOK_SECONDS = 0.25
SOON_SECONDS = 0.02
"""Between two looks for the moment at which the running batch can be made the last one."""
IDLE_LOOKS = 5
"""In a row, after which nothing is being read, and the query is not just between two batches."""
PICTURE_MS = 5000
"""Between two pictures of a run that goes on."""
LAST_REPORT_SECONDS = 10.0
"""How long the reports of the last batches may take to come after the query's end."""
GRACE_MS = 60_000
"""How long the first Ctrl-C waits for the running batch."""
STOP_SECONDS = 15.0
"""How long Spark may take to stop a query, or itself, before its processes are ended."""


def run_pipeline(pipeline: Pipeline, *, url: str, is_to_the_end: bool, dashboard: Path | None, is_json: bool) -> None:
    """Run it to its end. Raises PipelineFailed or ConfigError; KeyboardInterrupt if it was stopped before its end."""
    is_to_the_end = is_to_the_end or pipeline.is_available_now
    build.check_options(pipeline, url)
    build.check_function(pipeline)
    check_checkpoint(pipeline.checkpoint)
    build.check_brokers(pipeline, url)
    clock = SystemClock()
    history = History(pipeline.name, clock.now_ms())
    with _Signals() as signals, Screen(history) as screen, _session(pipeline, signals) as spark:
        signals.arm()
        run = _Run(spark, pipeline, history, screen, clock, signals, dashboard)
        try:
            run.start(url, is_to_the_end=is_to_the_end)
            screen.say(f"{pipeline.name}: {_ends(pipeline)}; checkpoint {pipeline.checkpoint}")
            run.follow()
        finally:
            run.picture()
    is_cut_short = signals.is_impatient or (signals.count > 0 and is_to_the_end)
    how = "stopped" if signals.count else "finished"
    summary = {**history.summary(clock.now_ms()), "state": how}
    sys.stdout.write((json.dumps(summary) if is_json else summary_lines(summary, how)) + "\n")
    if is_cut_short:
        raise KeyboardInterrupt


def check_pipeline(pipeline: Pipeline, *, url: str, with_plan: bool) -> None:
    """Say what the file describes; raises ConfigError for what is wrong with it."""
    build.check_options(pipeline, url)
    build.check_function(pipeline)
    check_checkpoint(pipeline.checkpoint)
    sys.stdout.write(f"{pipeline.file}: {pipeline.name}: {_ends(pipeline)}; checkpoint {pipeline.checkpoint}\n")
    if not with_plan:
        return
    build.check_brokers(pipeline, url)
    with _Signals() as signals, _session(pipeline, signals) as spark:
        signals.arm()
        for field in build.build(spark, pipeline, url).schema.fields:
            sys.stdout.write(f"  {field.name} {field.dataType.simpleString()}\n")


class _Run:
    """One query from start to end."""

    def __init__(
        self,
        spark: SparkSession,
        pipeline: Pipeline,
        history: History,
        screen: Screen,
        clock: SystemClock,
        signals: _Signals,
        picture: Path | None,
    ) -> None:
        self._spark = spark
        self._pipeline = pipeline
        self._history = history
        self._screen = screen
        self._clock = clock
        self._signals = signals
        self._picture = picture
        self._picture_ms = 0
        self._reports: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._over: set[str] = set()
        """Runs that have ended, as far as Spark has told, of any query: a listener hears of all in its session."""
        self._listener = _listener(self._reports.put, self._run_ended)
        self._query: StreamingQuery | None = None
        self._run_id = ""

    def start(self, url: str, *, is_to_the_end: bool) -> None:
        frame = build.build(self._spark, self._pipeline, url)
        self._spark.streams.addListener(self._listener)
        self._query = build.start(frame, self._pipeline, url, is_to_the_end=is_to_the_end)
        self._run_id = self._query.runId
        self._look_whether_over()

    def _run_ended(self, run: str) -> None:
        self._over.add(run)
        self._look_whether_over()

    def _look_whether_over(self) -> None:
        if self._run_id in self._over:
            self._ended.set()

    def follow(self) -> None:
        """Return when the query has ended, by itself or by a signal."""
        query = self._query
        assert query is not None
        self._signals.is_heeded = True
        stop_by: int | None = None
        last: LastBatch | None = None
        is_last = False
        """No batch begins behind the running one."""
        seen_at_signal = idle_looks = 0
        while query.isActive or (is_last and not self._ended.is_set()):
            now = self._clock.now_ms()
            if self._signals.count and stop_by is None:
                stop_by, seen_at_signal = now + GRACE_MS, self._history.count
                last = LastBatch(self._spark, query)
                self._screen.say("stopping when the running batch has ended; press Ctrl-C again to stop at once")
            if stop_by is not None and last is not None:
                if self._signals.is_impatient:
                    return
                is_idle = not query.status["isTriggerActive"]
                idle_looks = idle_looks + 1 if is_idle else 0
                if last.is_possible and not is_last and not is_idle:
                    is_last = last.tell()
                if last.is_possible:
                    # Between two batches it is idle for a moment, and must not be stopped: the next one may begin meanwhile.
                    is_between = idle_looks >= (1 if is_last else IDLE_LOOKS)
                else:
                    is_between = is_idle or self._history.count > seen_at_signal
                if is_between or now >= stop_by:
                    if not in_time(query.stop, self._signals):
                        return
                    break
            self._screen.state = "stopping" if stop_by is not None else query.status["message"].lower()
            self._take(wait=LOOK_SECONDS if stop_by is None or is_last else SOON_SECONDS)
            self._screen.refresh(now)
            if self._picture is not None and now - self._picture_ms >= PICTURE_MS:
                self.picture()
        self._ended.wait(LAST_REPORT_SECONDS)
        self._spark.streams.removeListener(self._listener)
        self._take(wait=0)
        failure = query.exception()
        if failure is not None:
            raise PipelineFailed(f"The query {self._pipeline.name} failed: {sentence(failure)}")

    def picture(self) -> None:
        """Write the dashboard, if one is wanted."""
        if self._picture is None:
            return
        self._picture_ms = self._clock.now_ms()
        try:
            write_picture(self._picture, self._history, self._picture_ms)
        except OSError as error:
            self._screen.say(f"The dashboard {self._picture} cannot be written: {error.strerror or error}.")
            self._picture = None

    def _take(self, wait: float) -> None:
        try:
            while True:
                report = self._reports.get(timeout=wait) if wait else self._reports.get_nowait()
                wait = 0
                if report["runId"] == self._run_id:
                    self._history.add(report)
        except queue.Empty:
            pass


class _Signals:
    """Counts the wishes to stop."""

    def __init__(self) -> None:
        self.count = 0
        self.is_heeded = False
        """Whether the count is looked at. Until then, while Spark starts, a signal ends the command by itself."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.getsignal(number)
        self.arm()
        return self

    def arm(self) -> None:
        """Take the signals (again: making a Spark context takes them too)."""
        for number in self._before:
            signal.signal(number, self._came)

    def __exit__(self, *_ended: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _came(self, _number: int, _frame: object) -> None:
        self.count += 1
        if not self.is_heeded:
            raise KeyboardInterrupt

    @contextmanager
    def held(self) -> Iterator[None]:
        """Signals that come inside wait for the end of it."""
        self.is_heeded = True
        try:
            yield
        finally:
            self.is_heeded = False
        if self.count:
            raise KeyboardInterrupt

    @property
    def is_impatient(self) -> bool:
        """Whether nothing is waited for any more."""
        return self.count > 1


def in_time(stop: Callable[[], object], signals: _Signals) -> bool:
    """Do something that should not take long; False: it did, or nobody wants to wait for it. It is left alone then."""
    done: Future[object] = Future()

    def work() -> None:
        try:
            done.set_result(stop())
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            done.set_exception(error)

    threading.Thread(target=work, name="stop", daemon=True).start()
    for _ in range(round(STOP_SECONDS / LOOK_SECONDS)):
        if signals.is_impatient:
            return False
        if wait([done], timeout=LOOK_SECONDS).done:
            done.result()
            return True
    return False


@contextmanager
def _session(pipeline: Pipeline, signals: _Signals) -> Iterator[SparkSession]:
    """A session of Spark. Its log is kept, and named, if something fails in it that the file is not to blame for."""
    log_path = build.log_file(pipeline)
    failure: Exception | None = None
    try:
        with log_path.open("wb") as log:
            spark = build.open_session(pipeline, log, signals.held)
            try:
                yield spark
            finally:
                _end(spark, signals)
    except PipelineFailed as error:
        failure = error
        raise PipelineFailed(f"{error.message} (Spark's log: {log_path})") from error
    except Exception as error:
        if not is_java_gone(error):
            raise
        failure = error
        raise PipelineFailed(f"{pipeline.name}: {sentence(error)} (Spark's log: {log_path})") from error
    finally:
        if failure is None:
            log_path.unlink(missing_ok=True)


def _end(spark: SparkSession, signals: _Signals) -> None:
    """Stop Spark, or end it."""
    gateway: Any = spark.sparkContext._gateway
    signals.is_heeded = True  # nothing else is left to be interrupted
    try:
        if not signals.is_impatient and in_time(spark.stop, signals):
            return
    except Exception as error:
        if not is_java_gone(error):
            raise
        return
    build.end_java(gateway)


def _listener(report: Callable[[dict[str, Any]], None], ended: Callable[[str], None]) -> Any:
    """A listener of Spark's that passes on what queries report, and which of their runs end."""
    from pyspark.sql.streaming.listener import (
        QueryIdleEvent,
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
        StreamingQueryListener,
    )

    class Listener(StreamingQueryListener):
        def onQueryStarted(self, event: QueryStartedEvent) -> None:
            pass

        def onQueryProgress(self, event: QueryProgressEvent) -> None:
            report(json.loads(event.progress.json))

        def onQueryIdle(self, event: QueryIdleEvent) -> None:
            pass

        def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
            ended(str(event.runId))

    return Listener()


def _ends(pipeline: Pipeline) -> str:
    """The pipeline's two ends for people."""

    def name(endpoint: Any) -> str:
        options = {key.lower(): value for key, value in endpoint.options.items()}
        for key in ("topic", "topics", "topicspattern", "subscribe", "subscribepattern", "path"):
            if key in options:
                return f"{endpoint.format} {options[key]}"
        return str(endpoint.format)

    return f"{name(pipeline.source)} to {name(pipeline.sink)}"
