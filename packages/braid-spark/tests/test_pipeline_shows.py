"""What a pipeline shows: history, lines, the picture, and failures in one sentence."""

from __future__ import annotations

import io
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from braid_spark.pipeline.dashboard import draw, write_picture
from braid_spark.pipeline.failures import sentence
from braid_spark.pipeline.history import KEPT, History
from braid_spark.pipeline.screen import Screen, panel, summary_lines

TOPIC = "topic://public/default/orders"


def report(number: int, rows: int = 100, lag: dict[str, int] | None = None, lost: int = 0, took: int = 500) -> dict[str, Any]:
    """As Spark reports it, cut down to what is used."""
    latest = None
    if lag is not None:
        latest = {"v": 1, "lag": sum(lag.values()), "lost": {"messages": lost, "segments": 1}, "topics": {TOPIC: lag}}
    return {
        "batchId": number,
        "timestamp": f"2026-03-01T10:{number // 60 % 60:02}:{number % 60:02}.000Z",
        "durationMs": {"triggerExecution": took},
        "sources": [{"numInputRows": rows, "latestOffset": latest}],
    }


def history(*reports: dict[str, Any], name: str = "revenue") -> History:
    made = History(name, 1_772_359_190_000)
    for each in reports:
        made.add(each)
    return made


def test_totals_and_rates() -> None:
    made = history(report(0), report(1, rows=300, lag={"3": 40, "4": 2}))
    assert (made.rows, made.count, made.busy_seconds) == (400, 2, 1.0)
    assert made.last is not None and made.last.rows_per_second == 600
    assert made.lag is not None and made.lag.total == 42 and made.lag.segments[f"{TOPIC} 3"] == 40
    summary = made.summary(1_772_359_200_000)
    assert summary["rowsPerSecond"] == 400.0 and summary["seconds"] == 10.0 and summary["lastBatch"] == 1
    assert summary_lines(summary, "finished") == (
        "revenue finished: 400 rows in 2 batches, 10.0 s, 400 rows/s while busy, lag 42"
    )


def test_what_other_sources_report_is_no_lag() -> None:
    made = history()
    latest: object
    for latest in (None, 5, "12", '{"a": 1}', "{", {"topics": {}}, ["x"]):
        made.add({**report(0), "sources": [{"numInputRows": -1, "latestOffset": latest}]})
    assert made.lag is None and made.rows == 0
    assert made.summary(0)["lag"] is None


def test_memory_is_bounded_and_totals_are_not() -> None:
    made = history(*(report(number, rows=1) for number in range(KEPT + 50)))
    assert len(made.batches) == KEPT and made.count == made.rows == KEPT + 50


def test_loss_is_told() -> None:
    made = history(report(0, lag={"0": 1}, lost=7))
    assert "7 messages lost" in summary_lines(made.summary(0), "stopped")


def test_lines_of_a_log_come_now_and_then() -> None:
    stream, made = io.StringIO(), history()
    with Screen(made, stream) as screen:
        screen.refresh(1000)
        made.add(report(0))
        screen.refresh(2000)
        screen.refresh(9000)
        made.add(report(1, lag={"0": 9}))
        screen.refresh(6999)
        screen.refresh(7000)
    lines = stream.getvalue().splitlines()
    assert lines == [
        "batch 0: 100 rows in 0.50 s, 200 rows/s, 100 rows in all",
        "batch 1: 100 rows in 0.50 s, 200 rows/s, lag 9, 200 rows in all",
    ]


def test_the_table_of_a_terminal_shows_the_segments_furthest_behind() -> None:
    made = history(report(3, lag={str(number): number for number in range(20)}))
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(panel(made, "running", 1_772_359_210_000))
    text = console.export_text()
    assert f"{TOPIC} 19" in text and f"{TOPIC} 1 " not in text and "8 more" in text
    assert "last commit" in text and "batch 3" in text and "190 messages" in text


@pytest.mark.parametrize("count", [0, 1, 2, 50])
def test_the_picture_is_sound(count: int) -> None:
    made = history(
        *(report(number, rows=number * 10, lag={"0": 100 - number, "1": 3}) for number in range(count)), name="a<b&c>"
    )
    picture = draw(made, 1_772_359_300_000)
    root = xml.etree.ElementTree.fromstring(picture)
    words = [each.text or "" for each in root.iter() if each.tag.endswith("text")]
    assert "a<b&c>" in words and ("nothing yet" in words) == (count == 0)
    assert "href" not in picture and "url(" not in picture
    if count == 50:
        assert "12,250" in words and "49 at 10:00:49" in words and "orders 0" in words


def test_a_picture_is_replaced_whole(tmp_path: Path) -> None:
    target = tmp_path / "query.svg"
    target.write_text("old")
    write_picture(target, history(report(0)), 0)
    assert target.read_text().startswith("<svg ") and [each.name for each in tmp_path.iterdir()] == ["query.svg"]
    with pytest.raises(OSError):
        write_picture(tmp_path / "missing" / "query.svg", history(), 0)


PYTHON_IN_JAVA = """\
[STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception: [PYTHON_STREAMING_DATA_SOURCE_RUNTIME_ERROR] Failed when \
Python streaming data source perform planPartitions: Traceback (most recent call last):
  File "python_streaming_source_runner.py", line 1, in main
    partitions = reader.partitions(start, end)
  File "stream_reader.py", line 2, in partitions
    raise KeyError("inner")
KeyError: 'inner'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "stream_reader.py", line 3, in partitions
    raise DataLost("...")
braid.errors.DataLost: Segment 3 of topic orders has lost 5: wanted 10, available 15. Set failOnDataLoss=false.
 SQLSTATE: 38000
\tat org.apache.spark.Something
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (PYTHON_IN_JAVA, "Segment 3 of topic orders has lost 5: wanted 10, available 15. Set failOnDataLoss=false."),
        (
            "[UNRESOLVED_COLUMN.WITH_SUGGESTION] A column with name `foo` cannot be resolved. Did you mean [`a`]. "
            "SQLSTATE: 42703; line 1 pos 7;\n'Project ['foo]\n",
            "A column with name `foo` cannot be resolved. Did you mean [`a`] (line 1, position 7).",
        ),
        ("", "ValueError."),
        ("plain", "plain."),
        ("x" * 5000, "x" * 600 + "..."),
    ],
)
def test_failures_in_one_sentence(text: str, said: str) -> None:
    assert sentence(ValueError(text)) == said


def test_a_java_that_is_gone() -> None:
    assert sentence(ConnectionRefusedError(111, "Connection refused")).startswith("Spark's Java process has ended")


def test_a_missing_key_is_called_that() -> None:
    """The function of a pipeline fails in the driver, one that runs on rows in a worker."""
    assert sentence(KeyError("amount")) == "KeyError: 'amount'."
    worker = (
        "Job aborted\nTraceback (most recent call last):\n  File 'm.py', line 3, in <lambda>\nKeyError: 'amount'\n\tat org.x"
    )
    assert sentence(ValueError(worker)) == "KeyError: 'amount'."
