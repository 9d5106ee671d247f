"""What a broker does again and again survives what nobody has foreseen: one item's exception is told once in a round, the other
items are looked at all the same, and the next round comes (INV15)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from braid.broker.bundles import HINTS
from braid.broker.mirror import Mirror
from braid.managedledger.log import ManagedLedger
from braid.metadata.api import Record
from braid.metadata.locks import ResourceLocks
from braid.model.names import TopicName
from braid.runtime.tasks import Tasks

TOPIC = TopicName.parse("t")


class Bug(Exception):
    """No error of this program."""


class Failing:
    """Stands for a method that fails until it is mended; counts its calls."""

    def __init__(self, honest: Callable[..., Any] | None = None) -> None:
        self.calls = 0
        self.is_mended = False
        self._honest = honest

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        if not self.is_mended:
            raise Bug("nobody has thought of this")
        return None if self._honest is None else self._honest(*args, **options)


class Told(logging.Handler):
    """The tracebacks in the log, except those of tasks that have ended."""

    def __init__(self) -> None:
        super().__init__()
        self.failures: list[str] = []
        self.ended: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and isinstance(record.exc_info[1], Bug | ExceptionGroup):
            (self.ended if record.name == "braid.runtime.tasks" else self.failures).append(record.getMessage())


@pytest.fixture
def told() -> Any:
    handler = Told()
    logging.getLogger("braid").addHandler(handler)
    yield handler
    logging.getLogger("braid").removeHandler(handler)


def running(broker: Any) -> list[str]:
    """Names of what the broker does again and again."""
    service = broker.service
    owners = [service, broker.ownership, broker.ownership._locks, broker.ownership.leading._election]
    owners += [service.transactions._sweeps, service.transactions.partitions, service.transactions.decisions]
    return sorted(task.get_name() for each in owners for task in each._tasks._running if not task.done())


class Case:
    """What fails, and how often it is tried in so many seconds."""

    def __init__(self, owner: Callable[[Any], Any], name: str, *, seconds: float = 5.0) -> None:
        self.owner = owner
        self.name = name
        self.seconds = seconds


CASES = {
    "owners": Case(lambda _broker: ManagedLedger, "check_owner"),
    "reconcile": Case(lambda broker: broker.ownership._registry, "reload"),
    "hints": Case(lambda broker: broker.ownership, "_pursue"),
    "balance": Case(lambda broker: broker.ownership.leading, "balance", seconds=20.0),
    "policies": Case(lambda broker: broker.service.namespaces, "policies"),
    "trim": Case(lambda _broker: ManagedLedger, "trim", seconds=60.0),
    "decisions": Case(lambda broker: broker.service.transactions.decisions, "reconcile"),
    "sweeps": Case(lambda broker: broker.service.transactions._sweeps._store, "expired"),
    "coordinators": Case(lambda broker: broker.service.transactions.partitions, "_reload"),
}


@pytest.mark.inv("INV15")
@pytest.mark.parametrize("name", CASES)
async def test_the_next_round_comes(world: Any, told: Told, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    case = CASES[name]
    broker = await world.broker(balance_seconds=20.0)
    await broker.service.topic(TOPIC, create=True)
    await world.advance(1)
    before = running(broker)
    owner = case.owner(broker)
    failing = Failing(getattr(owner, case.name))

    def stand_in(*args: Any) -> Any:  # a function, so that a class makes a method of it
        return failing(*args)

    monkeypatch.setattr(owner, case.name, stand_in)
    for _round in range(3):
        calls, tracebacks = failing.calls, len(told.failures)
        if name == "hints":
            broker.ownership._poke()
        await world.advance(2 * case.seconds)
        assert failing.calls > calls
        assert 0 < len(told.failures) - tracebacks <= failing.calls - calls, told.failures
    assert (running(broker), told.ended) == (before, [])
    failing.is_mended = True
    tracebacks, calls = len(told.failures), failing.calls
    await world.advance(2 * case.seconds)
    assert failing.calls > calls
    assert (len(told.failures), told.ended) == (tracebacks, [])


@pytest.mark.inv("INV15")
async def test_other_topics_are_looked_at_all_the_same_and_one_traceback_is_told(
    world: Any, broker: Any, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics = [await broker.service.topic(TopicName.parse(f"t{number}"), create=True) for number in range(40)]
    await world.advance(5)
    looks = {topic.log.name: Failing(topic.log.check_owner) for topic in topics}
    for number, look in enumerate(looks.values()):
        look.is_mended = number % 2 == 0
    monkeypatch.setattr(ManagedLedger, "check_owner", lambda log: looks[log.name]())
    for rounds in range(1, 4):
        await world.advance(5)
        assert {look.calls for look in looks.values()} == {rounds}
        assert len(told.failures) == rounds
    assert told.ended == []


@pytest.mark.inv("INV15")
async def test_other_locks_are_looked_at_all_the_same_and_one_traceback_is_told(
    world: Any, broker: Any, told: Told, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    locks = ResourceLocks(broker.service.metadata, broker.clock, reconcile_seconds=5)
    held = [await locks.acquire(f"/loadbalance/brokers/lock-{number}", b"mine") for number in range(6)]
    await world.advance(5)
    honest, looks = locks.store.get, list[str]()

    async def get(key: str, **options: Any) -> Record | None:
        if any(key == lock.key for lock in held):
            looks.append(key)
            if key in (held[0].key, held[1].key):
                raise Bug("nobody has thought of this")
        found: Record | None = await honest(key, **options)
        return found

    monkeypatch.setattr(locks.store, "get", get)
    for rounds in range(1, 4):
        looks.clear()
        await world.advance(5)
        assert sorted(looks) == sorted(lock.key for lock in held)
        assert len(told.failures) == rounds
    assert all(lock.holds() for lock in held)
    assert told.ended == []
    monkeypatch.undo()
    await locks.close()


@pytest.mark.inv("INV15")
@pytest.mark.parametrize("what", ["a record", "a listener", "the watch"])
async def test_a_mirror_goes_on(
    world: Any, broker: Any, told: Told, until: Any, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    store, tasks, changes = broker.service.metadata, Tasks("mirror"), list[int]()

    def decode(record: Record) -> bytes:
        if what == "a record" and record.value == b"bad":
            raise Bug("nobody has thought of this")
        return record.value

    def changed() -> None:
        changes.append(len(changes))
        if what == "a listener":
            raise Bug("nobody has thought of this")

    root = f"{HINTS}/public/default"
    mirror: Mirror[bytes] = Mirror(store, broker.clock, root, decode, changed)
    honest = store.watch
    is_broken = what == "the watch"

    def watch(*args: Any, **options: Any) -> Any:
        if is_broken and watched:
            raise Bug("nobody has thought of this")
        watched.append(True)
        return honest(*args, **options)

    watched: list[bool] = []
    monkeypatch.setattr(store, "watch", watch)
    await mirror.start(tasks)
    await world.advance(1)
    await store.put(f"{root}/a", b"bad")
    await store.put(f"{root}/b", b"good")
    is_broken = False
    await world.advance(2)
    await until(lambda: mirror.values.get(f"{root}/b") == b"good")
    assert (f"{root}/a" in mirror.values) == (what != "a record")
    assert told.failures
    assert told.ended == []
    told.failures.clear()
    await mirror.reload()
    assert len(told.failures) == (what == "a record"), "once in a round"
    assert len(tasks) == 1
    await tasks.close()
    for key in "ab":
        await store.delete(f"{root}/{key}")


@pytest.mark.inv("INV15")
async def test_an_election_goes_on(world: Any, told: Told, until: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    leader, other = [await world.broker() for _ in range(2)]
    await until(lambda: leader.ownership.is_leader)
    election = other.ownership.leading._election
    monkeypatch.setattr(election, "_try_to_win", failing := Failing(election._try_to_win))
    await leader.stop()
    await world.advance(12)
    assert failing.calls >= 2
    assert told.failures
    failing.is_mended = True
    await world.advance(6)
    await until(lambda: other.ownership.is_leader)
    assert told.ended == []


@pytest.mark.inv("INV15")
async def test_a_broker_comes_back_after_all(world: Any, told: Told, until: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = await world.broker(reconcile_seconds=1000.0)
    await world.advance(1)
    registry = broker.ownership._registry
    monkeypatch.setattr(registry, "register", failing := Failing(registry.register))
    broker._handle.pause_heartbeat()
    await world.advance(30)
    assert failing.calls >= 2
    assert told.failures
    failing.is_mended = True
    await world.advance(30)
    assert told.ended == []
    assert "ownership:session" in running(broker)
