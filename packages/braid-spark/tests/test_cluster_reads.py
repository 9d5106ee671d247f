"""What the planner is told, how often brokers are asked for it, and how a piece is fetched."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from braid.client.segment_reads import Fetched, Pruned, SegmentState, SegmentView, TopicView
from braid.errors import DataLost, NotReady, ProtocolError, TopicNotFound
from braid.model.segments import SegmentEnd
from braid_spark import reader, reads
from braid_spark.planner import Piece
from braid_spark.reader import AHEAD, _Fetches
from braid_spark.reads import ClusterReads

T = TypeVar("T")
TOPIC = "topic://public/default/orders"


def state(name: str, end: int = 10) -> SegmentState:
    return SegmentState(name, "inc", 0, end, end, False, 100)


class FakeReads:
    """A cluster that counts what it is asked. Fetches give ten messages each."""

    def __init__(self) -> None:
        self.segments = {number: SegmentView(number, f"segment-{number}", 0, 65535, (), (), False) for number in range(3)}
        self.gone: set[str] = set()
        self.ended = Pruned("inc", {})
        self.asked: list[Any] = []
        self.low = 0
        self.step = 10

    async def topic(self, name: str) -> TopicView:
        if name in self.gone:
            raise TopicNotFound(f"{name} does not exist.")
        return TopicView(name, "inc", 3, 0, self.segments)

    async def topics_matching(self, pattern: str) -> list[str]:
        self.asked.append(("match", pattern))
        return [TOPIC]

    async def pruned(self, topic: str) -> Pruned:
        self.asked.append(("pruned", topic))
        return self.ended

    async def states(self, topics: Sequence[str]) -> dict[str, SegmentState]:
        self.asked.append(("states", tuple(topics)))
        return {name: state(name) for name in topics if name not in self.gone}

    async def move_cursor(self, topic: str, incarnation: str, subscription: str, index: int) -> None:
        if topic in self.gone:
            raise TopicNotFound(f"{topic} does not exist.")
        self.asked.append(("move", topic, index))

    async def fetch(self, topic: str, incarnation: str, start: int, stop: int, *, max_bytes: int) -> Fetched:
        self.asked.append(("fetch", start))
        await asyncio.sleep(0)
        if start < self.low:
            raise DataLost("gone", self.low)
        return Fetched(min(start + self.step, stop), [], [], [], [], [], memoryview(b""))


class FakeLink:
    """A link whose loop runs on a thread, over `FakeReads`."""

    def __init__(self) -> None:
        self.reads = FakeReads()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def run(self, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return self.submit(start).result()

    def submit(self, start: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(start(), self.loop)

    def close(self) -> None:
        self.run(self._end)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    async def _end(self) -> None:
        """What was fetched ahead and is not wanted any more has been cancelled; let it end."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for each in others:
            each.cancel()
        await asyncio.gather(*others, return_exceptions=True)


@pytest.fixture
def link() -> Iterator[Any]:
    made = FakeLink()
    yield made
    made.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The time, which passes only by sleeping; what was slept is in the list behind it."""
    now = [1000.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        now.append(seconds)

    # Of this module alone: threads of other tests, such as a broker's, sleep by the real one.
    monkeypatch.setattr(reads, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    yield now


def test_a_state_is_asked_for_once_in_a_poll(link: Any, clock: list[float]) -> None:
    cluster = ClusterReads(link, [TOPIC])
    cluster.refresh()
    assert sorted(cluster.states(TOPIC, [0, 1])) == [0, 1]
    assert sorted(cluster.states(TOPIC, [0, 1])) == [0, 1]
    assert link.reads.asked == [("states", ("segment-0", "segment-1"))]


def test_the_next_poll_asks_for_all_at_once_and_gets_new_answers(link: Any, clock: list[float]) -> None:
    cluster = ClusterReads(link, [TOPIC])
    cluster.refresh()
    cluster.states(TOPIC, [0])
    cluster.states(TOPIC, [1])
    link.reads.asked.clear()
    cluster.refresh()
    assert link.reads.asked == [("states", ("segment-0", "segment-1"))]
    cluster.states(TOPIC, [0, 1])
    assert len(link.reads.asked) == 1


def test_polls_are_paced_by_waiting_not_by_old_answers(link: Any, clock: list[float]) -> None:
    cluster = ClusterReads(link, [TOPIC])
    cluster.refresh()
    cluster.states(TOPIC, [0])
    for _poll in range(90):
        cluster.refresh()
        cluster.states(TOPIC, [0])
    assert len(link.reads.asked) == 91
    assert sum(clock[1:]) == pytest.approx(90 * reads.POLL_SECONDS)
    clock[0] += 10
    cluster.refresh()
    assert len(clock) == 91, "a poll that comes late does not wait"


def test_segments_that_are_gone_are_left_out(link: Any, clock: list[float]) -> None:
    link.reads.gone = {"segment-1"}
    cluster = ClusterReads(link, [TOPIC])
    assert sorted(cluster.states(TOPIC, [0, 1, 77])) == [0]


def test_ends_of_removed_segments_are_those_of_the_same_topic(link: Any, clock: list[float]) -> None:
    cluster = ClusterReads(link, [TOPIC])
    link.reads.ended = Pruned("inc", {0: SegmentEnd(7, 3, 1), 4: SegmentEnd(0, 5, -1)})
    assert cluster.pruned_ends(TOPIC) == {0: 7, 4: 0}
    link.reads.ended = Pruned("", {})  # a broker that does not know of such ends
    assert cluster.pruned_ends(TOPIC) == {}
    link.reads.ended = Pruned("another", {0: SegmentEnd(7, 3, 1)})
    with pytest.raises(NotReady, match="created again"):
        cluster.pruned_ends(TOPIC)


def test_a_segment_that_is_just_gone_needs_no_cursor(link: Any, clock: list[float]) -> None:
    """It was removed because every subscription had read it, this one too; the layout at hand may not say so yet."""
    link.reads.gone = {"segment-1"}
    cluster = ClusterReads(link, [TOPIC])
    for segment in (0, 1, 77):
        cluster.move_cursor(TOPIC, segment, "inc", "query", 5)
    assert link.reads.asked == [("move", "segment-0", 5)]


def test_a_pattern_is_asked_for_once_a_second(link: Any, clock: list[float]) -> None:
    cluster = ClusterReads(link, [], "topic://public/default/.*")
    assert cluster.topics() == cluster.topics() == [TOPIC]
    assert len(link.reads.asked) == 1
    clock[0] += reads.LIST_SECONDS
    cluster.topics()
    assert len(link.reads.asked) == 2


def test_a_topic_of_a_pattern_that_is_gone_is_looked_for_in_a_new_list(link: Any, clock: list[float]) -> None:
    """The list may be a second old; whether the topic is lost, it says."""
    link.reads.gone = {TOPIC}
    cluster = ClusterReads(link, [], "topic://public/default/.*")
    assert cluster.topics() == [TOPIC]
    with pytest.raises(NotReady, match=TOPIC):
        cluster.view(TOPIC)
    cluster.topics()
    assert len(link.reads.asked) == 2
    with pytest.raises(TopicNotFound):
        ClusterReads(link, [TOPIC]).view(TOPIC)


def piece(start: int, stop: int) -> Piece:
    return Piece(TOPIC, "inc", 0, "segment-0", start, stop)


def test_fetches_follow_each_other_without_a_gap(link: Any) -> None:
    with _Fetches(link, piece(5, 47), is_loss_fatal=True) as fetches:
        assert [each.covered_to for each in fetches] == [15, 25, 35, 45, 47]
    assert link.reads.asked == [("fetch", start) for start in (5, 15, 25, 35, 45)]


def test_an_empty_range_asks_for_nothing(link: Any) -> None:
    with _Fetches(link, piece(5, 5), is_loss_fatal=True) as fetches:
        assert list(fetches) == []
    assert link.reads.asked == []


def test_only_so_many_are_fetched_ahead(link: Any) -> None:
    with _Fetches(link, piece(0, 1000), is_loss_fatal=True) as fetches:
        running = iter(fetches)
        next(running)
        fetches._under_way[-1].result()
        assert len(link.reads.asked) <= AHEAD + 1


def test_what_was_deleted_is_an_error_with_both_indexes(link: Any) -> None:
    link.reads.low = 20
    with _Fetches(link, piece(5, 47), is_loss_fatal=True) as fetches, pytest.raises(DataLost) as caught:
        list(fetches)
    assert "from index 5, available from 20" in str(caught.value)
    assert caught.value.low == 20


@pytest.mark.parametrize(("low", "covered"), [(20, [30, 40, 47]), (47, []), (90, [])])
def test_what_was_deleted_is_skipped_if_the_user_says_so(link: Any, low: int, covered: list[int]) -> None:
    link.reads.low = low
    with _Fetches(link, piece(5, 47), is_loss_fatal=False) as fetches:
        assert [each.covered_to for each in fetches] == covered


@pytest.mark.parametrize("step", [0, -3])
def test_a_reply_that_covers_nothing_is_not_believed(link: Any, step: int) -> None:
    link.reads.step = step
    with _Fetches(link, piece(5, 47), is_loss_fatal=True) as fetches, pytest.raises(ProtocolError, match="segment-0"):
        list(fetches)


def test_a_broker_that_cannot_deliver_ends_the_task(link: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_args: Any, **_options: Any) -> Fetched:
        raise NotReady("the owner is away")

    monkeypatch.setattr(link.reads, "fetch", refuse)
    with _Fetches(link, piece(5, 47), is_loss_fatal=False) as fetches, pytest.raises(NotReady):
        list(fetches)


def test_the_message_names_the_remedy() -> None:
    assert "failOnDataLoss=false" in reader.lost_message(piece(5, 47), 5, 20)


def test_an_answer_is_never_older_than_its_poll(link: Any, clock: list[float]) -> None:
    cluster = ClusterReads(link, [TOPIC])
    for wanted in ([0], [1], []):
        cluster.refresh()
        cluster.states(TOPIC, wanted)
    cluster.refresh()
    link.reads.asked.clear()
    cluster.states(TOPIC, [0])
    assert link.reads.asked == [("states", ("segment-0",))]
