"""`braid pipeline` as a process: runs, is stopped, goes on, ends, and says in one line what is wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from braid.client import blocking
from braid.testing.broker import BackgroundBroker

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
    spark.driver.extraJavaOptions: -XX:TieredStopAtLevel=1 -XX:+UseSerialGC
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


def run(*arguments: str | Path) -> tuple[int, str, str]:
    done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=PATIENCE, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def pipeline(tmp_path: Path, topic: Topic) -> Path:
    file = tmp_path / "shouting.yaml"
    file.write_text(PIPELINE.format(source=topic("topic", "in"), target=topic("persistent", "out")))
    (tmp_path / "shapes.py").write_text(SHAPES)
    return file


def test_runs_until_stopped_and_goes_on_to_the_end(
    pipeline: Path, broker: BackgroundBroker, client: blocking.Client, send: Send, topic: Topic
) -> None:
    send(topic("topic", "in"), [("k", str(number)) for number in range(30)])
    first = subprocess.Popen(
        command("run", pipeline, "--url", broker.service_url), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
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
            picture = pipeline.with_suffix(".svg")
            code, out, err = run(
                "run", pipeline, "--url", broker.service_url, "--available-now", "--output", "json", "--dashboard", picture
            )
            assert code == 0, err
            summary = json.loads(out)
            assert (summary["state"], summary["rows"], summary["lag"], summary["lost"]) == ("finished", 10, 0, 0)
            assert summary["lastBatch"] >= 1
            assert [consumer.receive(timeout=PATIENCE).payload for _ in range(10)] == [
                f"{number}!".encode() for number in range(30, 40)
            ]
            words = [each.text for each in xml.etree.ElementTree.parse(picture).iter() if each.tag.endswith("text")]
            assert "shouting" in words and "10" in words
    finally:
        if first.poll() is None:
            os.kill(first.pid, signal.SIGKILL)
            first.wait()


def test_a_topic_that_does_not_exist(pipeline: Path, broker: BackgroundBroker) -> None:
    code, out, err = run("run", pipeline, "--url", broker.service_url)
    assert (code, out) == (1, "")
    assert err.splitlines()[-1].startswith("error: The source of shouting cannot be read: ") and "Traceback" not in err
    assert "a_topic_that_does_not_exist" in err.replace("-", "_")


def test_what_is_wrong_is_told_before_spark_starts(pipeline: Path) -> None:
    pipeline.write_text(pipeline.read_text().replace("startingOffsets", "startingOfsets"))
    code, out, err = run("check", pipeline)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "shouting.yaml, line 5: source: There is no option startingOfsets" in err and "startingOffsets?" in err
    code, out, err = run("run", pipeline.with_name("none.yaml"))
    assert (code, out) == (
        2,
        "",
    ) and err == f"error: The pipeline file {pipeline.with_name('none.yaml')} cannot be read: No such file or directory.\n"
