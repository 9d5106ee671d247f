"""A source and a broker in a process of its own: segments that a query has read are sealed and removed while it is away, and
the broker is killed in between. Nothing is taken for lost that was read, nothing that was not is left out without a word."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from planner_world import make_options

from braid.client import blocking
from braid.errors import DataLost
from braid_spark.connections import Link
from braid_spark.pieces import Piece
from braid_spark.planner import Limits, Planner
from braid_spark.reads import ClusterReads

TOPIC = "topic://public/default/orders"
COMMAND = [sys.executable, "-m", "braid.cli.main", "standalone", "--port", "0", "--http-port", "0"]
SETTINGS = {"BRAID__SCALABLE_TOPICS__PRUNE_SECONDS": "0.1", "BRAID__RETENTION__UNREAD_MINUTES": "0"}


class Broker:
    """The process; `kill` and `start` again as often as wanted."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(
            [*COMMAND, "--data-dir", str(self._data)], stdout=subprocess.PIPE, text=True, env={**os.environ, **SETTINGS}
        )
        assert self._process.stdout is not None
        said = re.fullmatch(r"ready (\S+) (\S+)\n", self._process.stdout.readline())
        assert said is not None
        self.service_url, self.http_url = said.groups()

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.communicate(timeout=20)

    def send(self, first: int, last: int) -> None:
        with blocking.connect(self.service_url) as client, client.producer(TOPIC) as producer:
            for number in range(first, last):
                producer.send(b"%d" % number, key=f"key-{number}")


class Run:
    """A query that just started: nothing is known but the checkpoint."""

    def __init__(self, broker: Broker, **options: Any) -> None:
        self.link = Link(broker.service_url)
        self.reads = ClusterReads(self.link, [TOPIC])
        self.planner = Planner(make_options(**options), time.monotonic)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_error: object) -> None:
        self.link.close()

    def latest(self, start: dict[str, Any]) -> dict[str, Any]:
        self.reads.refresh()
        return self.planner.latest(start, Limits(), self.reads)

    def rows(self, start: dict[str, Any], end: dict[str, Any]) -> int:
        """How many messages a batch has."""
        return sum(self._count(piece) for piece in self.planner.partitions(start, end, self.reads))

    def _count(self, piece: Piece) -> int:
        reads = self.link.reads
        got = self.link.run(lambda: reads.fetch(piece.physical, piece.incarnation, piece.start, piece.stop, max_bytes=1 << 20))
        assert got.covered_to == piece.stop
        return got.last_index[-1] + 1 - piece.start

    def until_pruned(self, kept: set[int]) -> None:
        deadline = time.monotonic() + 30
        while set(self.reads.view(TOPIC).segments) != kept:
            assert time.monotonic() < deadline, f"still there: {set(self.reads.view(TOPIC).segments) - kept}"
            self.reads.refresh()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    started = Broker(tmp_path)
    yield started
    started.kill()


@pytest.mark.parametrize("ordering", ["key", "none"])
def test_a_query_that_was_away_while_its_segments_were_sealed_and_removed(broker: Broker, ordering: str) -> None:
    with blocking.AdminClient(broker.http_url) as admin:
        admin.scalable_topics.create(TOPIC, segments=2)
        broker.send(0, 40)
        with Run(broker, ordering=ordering) as query:
            begin = query.planner.initial()
            start = query.latest(begin)
            assert query.rows(begin, start) == 40
        admin.scalable_topics.merge_segments(TOPIC, 0, 1)
        with Run(broker, ordering=ordering) as query:
            query.until_pruned({2})
    broker.kill()
    broker.start()
    with Run(broker, ordering=ordering) as query:
        assert query.latest(start) is start
        assert query.planner.lag(start, query.reads)["lag"] == 0
        assert query.planner.lag(start, query.reads)["lost"] == {"messages": 0, "segments": 0}
    broker.send(40, 45)
    with Run(broker, ordering=ordering) as query:
        assert query.planner.lag(start, query.reads)["lag"] == 5
        end = query.latest(start)
        assert query.rows(start, end) == 5
    with Run(broker, ordering=ordering) as query:  # the batch was not finished: it is run again
        assert query.rows(start, end) == 5
        assert query.latest(end) is end
    broker.send(45, 52)
    with blocking.AdminClient(broker.http_url) as admin:
        admin.scalable_topics.split_segment(TOPIC, 2)
    with Run(broker, ordering=ordering) as query:  # and this time something is lost
        query.until_pruned({3, 4})
        with pytest.raises(DataLost, match=r"segment 2 of .* are lost, 7 in number: .* from index 5 to 12"):
            query.latest(end)
    broker.send(52, 55)
    with Run(broker, ordering=ordering, fail_on_data_loss=False) as query:
        last = query.latest(end)
        assert query.rows(end, last) == 3
        assert query.planner.lag(last, query.reads)["lost"] == {"messages": 7, "segments": 1}
