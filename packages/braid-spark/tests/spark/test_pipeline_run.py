"""`braid pipeline`: as a process it runs and is stopped; then, in the session of all tests, it goes on, ends, and says in one
line what is wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from fork_client import ADDRESS
from pyspark.sql import SparkSession
from quick_start import JAVA_OPTIONS

from braid.client import blocking
from braid.errors import ConfigError
from braid.testing.broker import BackgroundBroker
from braid_spark.pipeline import runner
from braid_spark.pipeline.failures import PipelineFailed
from braid_spark.pipeline.spec import load

Send = Callable[[str, Iterable[tuple[str | None, str]]], None]
Topic = Callable[..., str]
PATIENCE = 240.0
PIPELINE = """\
name: shouting
source:
  options:
    topic: {source}
    startingOffsets: earliest
    subscription: shouting
transform:
  python: shapes:shout
sink:
  options:
    topic: {target}
trigger: {{every: 100ms}}
checkpoint: state
spark:
  conf:
    spark.master: local[2]
    spark.driver.extraJavaOptions: {java}
"""
SHAPES = """\
from pyspark.sql import functions as F

@F.udf("string")
def loud(value):
    return bytes(value).decode() + "!"

def shout(frame):
    return frame.select("__key", loud("value").alias("value"))
"""


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "braid.cli.main", "pipeline", *map(str, arguments)]


@pytest.fixture
def run_here(spark: SparkSession, broker: BackgroundBroker, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Runs a pipeline in the session that is there: starting another one would show nothing more."""

    @contextmanager
    def session(*_asked_for: object) -> Iterator[SparkSession]:
        yield spark

    def run(file: Path, dashboard: Path | None = None, is_to_the_end: bool = True) -> None:
        runner.run_pipeline(load(file), url=broker.service_url, is_to_the_end=is_to_the_end, dashboard=dashboard, is_json=True)

    monkeypatch.setattr(runner, "_session", session)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", os.environ["PYTHONPATH"])
    return run


@pytest.fixture
def pipeline(tmp_path: Path, topic: Topic) -> Path:
    file = tmp_path / "shouting.yaml"
    source, target = topic("topic", "in"), topic("persistent", "out")
    file.write_text(PIPELINE.format(source=source, target=target, java=JAVA_OPTIONS))
    (tmp_path / "shapes.py").write_text(SHAPES)
    return file


def test_runs_until_stopped_and_goes_on_to_the_end(
    pipeline: Path,
    broker: BackgroundBroker,
    client: blocking.Client,
    send: Send,
    topic: Topic,
    spark: SparkSession,
    run_here: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    send(topic("topic", "in"), [("k", str(number)) for number in range(30)])
    first = subprocess.Popen(
        command("run", pipeline, "--url", broker.service_url),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if name != ADDRESS},  # all by itself, as users have it
    )
    try:
        with client.consumer(topic("persistent", "out"), "look", initial="earliest") as consumer:
            came = [consumer.receive(timeout=PATIENCE).payload for _ in range(30)]
            assert came == [f"{number}!".encode() for number in range(30)]
            first.send_signal(signal.SIGINT)
            out, err = first.communicate(timeout=PATIENCE)
            assert (first.returncode, out.count("\n")) == (0, 1), err
            assert out.startswith("shouting stopped: 30 rows in ") and "lag 0" in out
            assert "stopping when the running batch has ended" in err and "Traceback" not in err

            send(topic("topic", "in"), [("k", str(number)) for number in range(30, 40)])
            spark.sparkContext.addPyFile(str(pipeline.with_name("shapes.py")))
            picture = pipeline.with_suffix(".svg")
            for rows in (10, 0):
                run_here(pipeline, dashboard=picture)
                summary = json.loads(capsys.readouterr().out)
                assert (summary["state"], summary["rows"], summary["lost"]) == ("finished", rows, 0)
                assert summary["lag"] == (0 if rows else None)
                assert rows == 0 or summary["lastBatch"] >= 1
                words = [each.text for each in xml.etree.ElementTree.parse(picture).iter() if each.tag.endswith("text")]
                assert "shouting" in words and (str(rows) in words)
            assert [consumer.receive(timeout=PATIENCE).payload for _ in range(10)] == [
                f"{number}!".encode() for number in range(30, 40)
            ]
    finally:
        if first.poll() is None:
            os.kill(first.pid, signal.SIGKILL)
            first.wait()


def batches(checkpoint: Path, log: str) -> set[str]:
    return {each.name for each in (checkpoint / log).iterdir() if each.name.isdigit()}


def test_a_stop_begins_no_other_batch(
    pipeline: Path,
    broker: BackgroundBroker,
    client: blocking.Client,
    send: Send,
    topic: Topic,
    run_here: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Though there is always more to read."""
    send(topic("topic", "in"), [("k", str(number)) for number in range(400)])
    text = pipeline.read_text().replace("subscription: shouting", "maxMessagesPerTrigger: 5")
    text = text.replace("transform:\n  python: shapes:shout\n", "").replace("trigger: {every: 100ms}\n", "")
    pipeline.write_text(text)

    def stop_soon() -> None:
        with client.consumer(topic("persistent", "out"), "look", initial="earliest") as consumer:
            consumer.receive(timeout=PATIENCE)
        os.kill(os.getpid(), signal.SIGINT)

    with ThreadPoolExecutor(1) as beside:
        stopping = beside.submit(stop_soon)
        run_here(pipeline, is_to_the_end=False)
        stopping.result()
    summary = json.loads(capsys.readouterr().out)
    assert summary["state"] == "stopped" and 0 < summary["rows"] < 400
    done = batches(pipeline.with_name("state"), "commits")
    assert batches(pipeline.with_name("state"), "offsets") == done, "what was begun has ended"
    assert summary["rows"] == 5 * len(done)


def test_a_topic_that_does_not_exist(pipeline: Path, run_here: Callable[..., None]) -> None:
    with pytest.raises(PipelineFailed) as caught:
        run_here(pipeline)
    assert caught.value.message.startswith("The source of shouting cannot be read: ")
    assert "a-topic-that-does-not-exist" in caught.value.message.replace("_", "-") and "\n" not in caught.value.message


def test_a_transform_that_fails(pipeline: Path, run_here: Callable[..., None], send: Send, topic: Topic) -> None:
    send(topic("topic", "in"), [("k", "1")])
    pipeline.write_text(pipeline.read_text().replace("shapes:shout", "sulks:sulk"))
    pipeline.with_name("sulks.py").write_text("def sulk(frame):\n    raise ValueError('not today')\n")
    with pytest.raises(ConfigError) as caught:
        run_here(pipeline)
    assert caught.value.message == f"{pipeline}: sulks:sulk failed: not today."


def test_what_is_wrong_is_told_before_spark_starts(pipeline: Path) -> None:
    pipeline.write_text(pipeline.read_text().replace("startingOffsets", "startingOfsets"))
    done = subprocess.run(command("check", pipeline), capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "shouting.yaml, line 5: source: There is no option startingOfsets" in done.stderr
    assert "startingOffsets?" in done.stderr
