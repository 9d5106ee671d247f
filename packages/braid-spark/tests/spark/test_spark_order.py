"""Order per key on a cluster of two executors, while the topic that is read splits and merges.

What is promised with `ordering=key`, the default:

- Rows of a key that come in different micro-batches come in the order in which they were sent.
- Within a micro-batch all rows of a key are in one task of the source, in order. A narrow query (no shuffle) into the `braid`
  sink therefore writes them in order, and so does every task with all of its rows.
- Behind a shuffle the rows of one batch may come in any order; `__segment` and `__index` order those of a key. A stateful
  handler that sorts by them sees the order in which they were sent.

The control is the same with `ordering=none`, which promises none of it and must be seen to break it.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fault_checks import read_all
from fault_cluster import HERE, Broker, Driver, SparkCluster, clean
from fork_server import ForkServer

from braid.client import blocking

KEYS = [f"key-{number}" for number in range(40)]
ROUNDS = 6
"""Messages of each key that are sent with each change of the layout."""
LIMIT = 200
"""Messages of one micro-batch: fewer than are sent with a change, so that parents are not read yet when their children have
something to read."""
INPUT = "topic://public/default/order-in"
OUTPUT = "persistent://public/default/order-out"
STUCK_SECONDS = 200.0

Seen = dict[str, Any]


class Load:
    """Sends 0, 1, 2, ... of every key."""

    def __init__(self, producer: blocking.Producer) -> None:
        self._producer = producer
        self.rounds = 0

    def send(self, rounds: int) -> None:
        for number in range(self.rounds, self.rounds + rounds):
            for sent in [self._producer.send_nowait(b"%d" % number, key=key) for key in KEYS]:
                sent.result()
        self.rounds += rounds


class Cluster:
    """Everything that runs beside the test."""

    def __init__(self, folder: Path, fork_server: ForkServer) -> None:
        self.folder = folder
        path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
        environment = {**fork_server.environment, "PYTHONPATH": path}
        self.broker = Broker(folder)
        try:
            self.spark = SparkCluster(folder, environment)
        except BaseException:
            self.broker.close()
            raise
        arguments = {
            "master": self.spark.url,
            "scratch": folder / "scratch",
            "url": self.broker.url,
            "input": INPUT,
            "output": OUTPUT,
            "folder": folder,
            "stop": folder / "stop",
            "rows": LIMIT,
        }
        words = [str(word) for name, value in arguments.items() for word in (f"--{name}", value)]
        self.driver = Driver(folder, environment, words, "order_driver.py")

    def batches(self, kind: str) -> int:
        """How many micro-batches the query with `ordering=key` has finished."""
        commits = self.folder / f"checkpoint-{kind}-key" / "commits"
        return sum(each.name.isdigit() for each in commits.iterdir()) if commits.exists() else 0

    def both(self) -> tuple[int, int]:
        """The same of the narrow and the stateful query."""
        return self.batches("narrow"), self.batches("stateful")

    def wait(self, what: str, is_there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + STUCK_SECONDS
        while not is_there():
            if self.driver.poll() not in (None, 0) or time.monotonic() > deadline:
                pytest.fail(f"{what} did not happen; the driver wrote:\n{self.driver.log.read_text()[-4000:]}")
            time.sleep(0.05)

    def wait_for_another_batch(self) -> None:
        """Of both queries."""
        narrow, stateful = self.both()
        self.wait("another batch", lambda: self.batches("narrow") > narrow and self.batches("stateful") > stateful)

    def close(self) -> None:
        self.driver.reap()
        self.spark.close()
        self.broker.close()
        clean(self.folder)


@pytest.fixture
def cluster(tmp_path: Path, fork_server: ForkServer) -> Iterator[Cluster]:
    started = Cluster(tmp_path, fork_server)
    try:
        yield started
    finally:
        started.close()


def by_key(rows: list[Seen]) -> dict[str, list[Seen]]:
    found: dict[str, list[Seen]] = defaultdict(list)
    for row in rows:
        found[row["key"]].append(row)
    return found


def steps_back(rows: list[Seen]) -> int:
    """Rows that come right behind a later one of the same key."""
    return sum(after["number"] < before["number"] for mine in by_key(rows).values() for before, after in pairwise(mine))


def places_back(rows: list[Seen]) -> int:
    """The same by segment and place in it, which say the order too."""
    return sum(
        (after["segment"], after["place"]) <= (before["segment"], before["place"])
        for mine in by_key(rows).values()
        for before, after in pairwise(mine)
    )


def states_back(rows: list[Seen]) -> int:
    """Rows of which the handler found a later one in its state, by number or by place."""
    return sum(
        row["number"] <= row["last_number"] or (row["segment"], row["place"]) <= (row["last_segment"], row["last_place"])
        for row in rows
    )


def unsorted(rows: list[Seen]) -> int:
    """Rows that the handler had to put elsewhere; no promise, and often none."""
    return sum(
        after["arrival"] < before["arrival"]
        for mine in by_key(rows).values()
        for before, after in pairwise(mine)
        if before["batch"] == after["batch"]
    )


def tasks_back(rows: list[Seen]) -> int:
    """Rows that come behind a later one of the same task."""
    last: dict[tuple[int, int], int] = {}
    count = 0
    for row in rows:
        task = row["batch"], row["task"]
        count += row["row"] <= last.get(task, -1)
        last[task] = row["row"]
    return count


def spread_keys(rows: list[Seen]) -> int:
    """Keys of a batch that more than one task had."""
    tasks: dict[tuple[int, str], set[int]] = defaultdict(set)
    for row in rows:
        tasks[row["batch"], row["key"]].add(row["task"])
    return sum(len(each) > 1 for each in tasks.values())


@pytest.mark.timeout(420)
def test_keys_stay_in_order_on_two_executors_while_the_topic_splits_and_merges(cluster: Cluster) -> None:
    url, http_url = cluster.broker.url, cluster.broker.http_url
    seen_at: list[tuple[int, int]] = []
    """Batches that both queries had finished, at each change."""
    with (
        blocking.AdminClient(http_url) as admin,
        blocking.connect(url) as client,
        ThreadPoolExecutor(1) as beside,
    ):
        topics = admin.scalable_topics
        topics.create(INPUT)
        changes: list[Callable[[], object]] = [
            lambda: topics.split_segment(INPUT, 0),  # into 1 and 2
            lambda: topics.split_segment(INPUT, 1),  # into 3 and 4
            lambda: topics.merge_segments(INPUT, 4, 2),  # into 5
        ]
        with client.producer(INPUT) as producer:
            load = Load(producer)
            load.send(ROUNDS)
            cluster.driver.start()
            cluster.wait("a first batch", lambda: min(cluster.both()) > 0)
            for change in changes:
                seen_at.append(cluster.both())
                sending = beside.submit(load.send, ROUNDS - 2)
                change()
                sending.result()
                load.send(2)  # however quick it was: the new segments get something
                cluster.wait_for_another_batch()
    (cluster.folder / "stop").touch()
    cluster.wait("the end of the queries", lambda: cluster.driver.poll() == 0)

    sent = sorted((key, number) for key in KEYS for number in range(load.rounds))
    with ThreadPoolExecutor(2) as readers:
        outputs = {ordering: readers.submit(read_all, url, f"{OUTPUT}-{ordering}", len(sent)) for ordering in ("key", "none")}
    narrow, stateful = {}, {}
    for ordering, output in outputs.items():
        narrow[ordering] = [json.loads(each) for each in output.result()]
        lines = (cluster.folder / f"stateful-{ordering}.jsonl").read_text().splitlines()
        stateful[ordering] = [json.loads(line) for line in lines]
        for kind, rows in (("narrow", narrow[ordering]), ("stateful", stateful[ordering])):
            assert sorted((row["key"], row["number"]) for row in rows) == sent, f"{kind}, {ordering}: not every message once"
            assert {row["segment"] for row in rows} == set(range(6)), f"{kind}, {ordering}: a layout change is missing"
            print(kind, ordering, f"{len(rows)} rows, {len({row['batch'] for row in rows})} batches")
        print(f"{states_back(stateful[ordering])} steps back in the state, {unsorted(stateful[ordering])} rows came unsorted")
        print(f"{steps_back(narrow[ordering])} steps back at the sink, {tasks_back(narrow[ordering])} within tasks")
        print(f"{spread_keys(narrow[ordering])} keys of a batch in several tasks")
    print("batches finished at the changes (narrow, stateful):", seen_at)
    for kind, (place, rows) in {"narrow": (0, narrow["key"]), "stateful": (1, stateful["key"])}.items():
        done = [sum(row["batch"] < finished[place] for row in rows) for finished in seen_at]
        print(kind, "rows done at the changes:", done, "of", [ROUNDS * len(KEYS) * (step + 1) for step in range(len(changes))])

    assert min(seen_at[0]) > 0, "the queries run before the first change"
    last = {kind: max(row["batch"] for row in rows["key"]) for kind, rows in (("narrow", narrow), ("stateful", stateful))}
    assert last["narrow"] >= seen_at[-1][0], "and after the last"
    assert last["stateful"] >= seen_at[-1][1]

    for rows in (narrow["key"], stateful["key"]):
        assert len({row["reader"] for row in rows}) == 2, "two executors have read"
        assert spread_keys(rows) == 0, "a key is in one task of a batch"
    print(len({row["executor"] for row in stateful["key"]}), "executors had the state")

    assert states_back(stateful["key"]) == 0
    assert all(row["number"] == row["last_number"] + 1 for row in stateful["key"]), "none left out on the way"
    assert steps_back(narrow["key"]) == places_back(narrow["key"]) == 0
    assert tasks_back(narrow["key"]) == 0

    assert states_back(stateful["none"]) > 0, "without order these must be seen, or the test shows nothing"
    assert steps_back(narrow["none"]) > 0
