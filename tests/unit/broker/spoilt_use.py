"""A broker on a store with one record of nonsense is used, and judged.

What the record is about may be refused, by an error or a line of the log that names the record; everything else goes on,
nothing is deleted, nothing hangs and nothing is logged with frames.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import msgspec
from tests.unit.broker.record_kinds import kind_of
from tests.unit.broker.spoilt import HALF, HEALTHY, LEDGER, PARTED, PLAIN, SCALED, SINK, Kept, SpoiltWorld, pump, register

from braid.errors import BraidError, ConfigError, NotReady, PreconditionFailed, TopicTerminated, from_code
from braid.metadata.journal import INDEX, PARTITION
from braid.model.names import TopicName
from braid.model.segments import physical_name
from braid.scalable.config import ScalableConfig
from braid.testing.raw_client import position_of
from braid.web.admin import Admin
from braid.web.app import make_app
from braid.wire import requests, sink_requests
from braid.wire.types import InitialPosition, SubType

ATTEMPTS = 8
PATIENCE = 300.0
"""Virtual seconds that one use may take."""
NO_ANSWER = "no answer"
STATUS_500 = "status 500"
HOLD_UP = ("transaction", "operation of a transaction")
"""Messages behind one that may have been aborted wait, until somebody says what became of it."""
RUN_OUT = ("transaction", "operation of a transaction", "sub-transaction")
"""Records that go when their time is over."""
START = "start"
GRACE_SECONDS = 3600.0
"""Of consumers that do not come back: longer than a case."""
REAL_PATIENCE = 120.0
"""Real seconds that a case may take."""
FINE = f"persistent://{HEALTHY}/plain"
PAGES = (
    "clusters",
    "clusters/elsewhere",
    "tenants",
    "tenants/public",
    "namespaces/public",
    "namespaces/public/default",
    "namespaces/public/default/topics",
    "persistent/public/default/plain/stats",
    "persistent/public/default/plain/internalStats",
    "persistent/public/default/plain/internal-info",
    "persistent/public/default/plain/subscriptions",
    "persistent/public/default/parted/partitions",
    "persistent/public/default/parted/partitioned-stats",
    "scalable/public/default",
    "scalable/public/default/scaled",
    "scalable/public/default/scaled/stats",
    "scalable/public/default/half/stats",
    "v3/transactions",
    "v3/sinks",
    "brokers",
    "brokers/health",
    "brokers/leaderBroker",
    "broker-stats/topics",
    f"persistent/{HEALTHY}/plain/stats",
    f"scalable/{HEALTHY}/scaled/stats",
)


Live = Callable[[SpoiltWorld], dict[str, bytes]]
"""Asked what to edit when a broker has been used."""


class Logged(logging.Handler):
    """What brokers log."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        self.crashes: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self.lines.append(text)
        if record.exc_info and record.exc_info[1] is not None and not isinstance(record.exc_info[1], BraidError):
            self.crashes.append(f"{text}: {record.exc_info[1]!r}")
        elif record.levelno >= logging.ERROR and not record.exc_info:
            self.crashes.append(text)


class Outcome:
    """Of one case."""

    def __init__(self) -> None:
        self.refusals: dict[str, str] = {}
        self.kept: set[str] = set()
        self.ledgers: set[int] = set()
        self.logged = Logged()


class Follow:
    """What `current` has at the moment: calls of the application keep some of it from when they are made."""

    def __init__(self, current: Callable[[], Any]) -> None:
        self._current = current

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._current(), name)
        is_part = type(value).__module__.startswith("braid.") and not callable(value) and not isinstance(value, msgspec.Struct)
        return Follow(lambda: getattr(self._current(), name)) if is_part else value


class Web:
    """The administrator's pages, without a socket. The application is made once: that takes longer than a case."""

    def __init__(self) -> None:
        self._broker: Any = None
        self._client: httpx.AsyncClient | None = None

    async def get(self, broker: Any, path: str) -> None:
        """Raises BraidError for an answer of 400 or more, AssertionError for one of 500."""
        self._broker = broker
        if self._client is None:
            service, server = Follow(lambda: self._broker.service), Follow(lambda: self._broker.server)
            transport = httpx.ASGITransport(make_app(Admin(service, server, lambda: True)), raise_app_exceptions=False)  # type: ignore[arg-type]
            self._client = httpx.AsyncClient(transport=transport, base_url="http://braid")
        answer = await self._client.get(f"/admin/{path}" if path.startswith("v3") else f"/admin/v2/{path}")
        assert answer.status_code != 500, f"{STATUS_500}: {answer.text}"
        if answer.status_code >= 400:
            raise BraidError(f"{answer.status_code} {answer.text}")


async def run_case(web: Web, kept: Kept, edited: dict[str, bytes], live: Live | None = None) -> Outcome:
    """Start a broker on the edited store and use all of it; the errors by what was tried. `live` is asked for more edits when
    the broker has been used: then it is used once more."""
    outcome = Outcome()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: outcome.logged.crashes.append(f"loop: {context}"))
    root = logging.getLogger("braid")
    level = root.level
    root.setLevel(logging.INFO)
    root.addHandler(outcome.logged)
    world = SpoiltWorld(kept, edited)
    await world.open()
    pumping = asyncio.ensure_future(pump(world))
    try:
        async with asyncio.timeout(REAL_PATIENCE):
            try:
                broker = await world.broker(scalable=ScalableConfig(consumer_grace_seconds=GRACE_SECONDS))
            except ConfigError as error:
                outcome.refusals[START] = str(error)
                outcome.kept, outcome.ledgers = set(world.metadata.tables.rows), set(world.ledgers._ledgers)
                return outcome
            await _use_everything(web, world, broker, outcome)
            if live is not None:
                assert not outcome.refusals, outcome.refusals
                await _edit(world, live(world))
                await _use_everything(web, world, broker, outcome)
            outcome.kept = set(world.metadata.tables.rows)
            outcome.ledgers = set(world.ledgers._ledgers)
    finally:
        pumping.cancel()
        root.removeHandler(outcome.logged)
        root.setLevel(level)
        await world.close()
        loop.set_exception_handler(None)
    return outcome


async def _edit(world: SpoiltWorld, edited: dict[str, bytes]) -> None:
    """As somebody with a tool does: it is nobody's session's any more, and is found as before."""
    editor = world.metadata.handle("editor", clock=world.clock)
    for key, value in edited.items():
        row = world.metadata.tables.rows[key]
        await editor.put(key, value, partition=row[PARTITION], index=dict(row[INDEX]) or None)
    await editor.close()


async def _use_everything(web: Web, world: SpoiltWorld, broker: Any, outcome: Outcome) -> None:
    async def attempt(what: str, work: Callable[..., Awaitable[Any]], *given: Any) -> None:
        """Do it, again if it says that it may be tried again, as clients do."""
        until = world.clock.monotonic() + PATIENCE
        outcome.refusals.pop(what, None)
        for _attempt in range(ATTEMPTS):
            task = asyncio.ensure_future(work(*given))
            while not task.done() and world.clock.monotonic() < until:  # noqa: ASYNC110 - the clock's time, not the loop's
                await asyncio.sleep(0)
            is_late = not task.done() and task.cancel()
            try:
                await task
            except (NotReady, OSError) as error:
                outcome.refusals[what] = f"{type(error).__name__}: {error}"
                await world.clock.sleep(1.0)
                continue
            except BraidError as error:
                outcome.refusals[what] = f"{type(error).__name__}: {error}"
            except AssertionError as error:
                outcome.refusals[what] = f"cut off: {error!r}"
            except asyncio.CancelledError:
                if not is_late:
                    raise
                outcome.refusals[what] = NO_ANSWER
            else:
                outcome.refusals.pop(what, None)
            return

    use = Use(broker)
    await attempt("fine sub", use.topic, FINE, "sub")
    await attempt("fine other", use.topic, FINE, "other")
    await attempt("fine scaled", use.scaled, f"topic://{HEALTHY}/scaled")
    await attempt("fine stream", use.registered, f"topic://{HEALTHY}/scaled")
    await attempt("fine transaction", use.transaction)
    await attempt("plain sub", use.topic, PLAIN, "sub")
    await attempt("plain other", use.topic, PLAIN, "other")
    await attempt("plain new", use.topic, PLAIN, "new")
    await attempt("parted", use.topic, f"{PARTED}-partition-0", "sub")
    await attempt("scaled", use.scaled, str(SCALED))
    await attempt("half", use.scaled, str(HALF))
    await attempt("stream", use.registered, str(SCALED))
    await attempt("regular stream", use.registered, PLAIN)
    await attempt("sink", use.sink)
    for path in PAGES:
        await attempt(f"{'fine' if HEALTHY in path else 'page'} {path}", web.get, broker, path)


class Use:
    """What clients do."""

    def __init__(self, broker: Any) -> None:
        self._broker = broker
        self._service = broker.service

    async def topic(self, topic: str, subscription: str, kind: SubType = SubType.EXCLUSIVE) -> None:
        """A message is sent, and comes, with those before it."""
        client = await self._broker.client(is_braid=True)
        try:
            client.send(requests.lookup(90, topic))
            await client.answer(90)
            await client.subscribe(topic, subscription, kind, permits=1000, initial=InitialPosition.EARLIEST)
            await client.producer(topic)
            position = await client.store(b"last", 0)
            while position_of((await client.messages(1))[0].command.message_id) != position:
                pass
            await client.acked(position)
        finally:
            client.close()

    async def scaled(self, topic: str) -> None:
        try:
            await self._scaled(TopicName.parse(topic))
        except (PreconditionFailed, TopicTerminated) as error:  # the split of an earlier attempt was finished meanwhile
            raise NotReady(error.message) from None

    async def _scaled(self, name: TopicName) -> None:
        controller = await self._service.scalable.lead_scalable(name)
        segments = controller.layout.active_in_order
        for segment in segments:
            await self.topic(str(physical_name(name, segment)), "other", SubType.SHARED)
        await controller.stats()
        await controller.split_segment(segments[0].segment_id)

    async def registered(self, topic: str) -> None:
        client = await self._broker.client(is_braid=True)
        try:
            reply = await register(client, topic, "new", 60)
            if reply.HasField("error"):
                raise from_code(reply.error, reply.message)
        finally:
            client.close()

    async def transaction(self) -> None:
        client = await self._broker.client(is_braid=True)
        try:
            await client.producer(FINE)
            txn = await client.begin(3)
            await client.store(b"txn", 0, txn=txn)
            await client.end(txn, commit=True)
        finally:
            client.close()

    async def sink(self) -> None:
        client = await self._broker.client(is_braid=True)
        try:
            client.send(sink_requests.get(9, SINK))
            await client.answer(9)
        finally:
            client.close()


# Judgement.


def may_refuse(key: str) -> tuple[str, ...]:  # noqa: PLR0911 - a table
    """What may be refused because of this record, as far as names begin so; the pages that show it besides."""
    parts = key.removeprefix("/").split("/")
    match parts:
        case ["admin", "namespaces" | "tenants", "public", *_]:
            return ("plain", "part", "scaled", "half", "stream", "regular")
        case ["admin", "partitioned-topics", *_]:
            return ("part",)
        case ["managed-ledgers", _, _, "persistent", "plain"] | [
            "managed-ledgers",
            _,
            _,
            "persistent",
            "plain",
            "pulsar.dedup",
        ]:
            return ("plain", "regular")
        case ["managed-ledgers", _, _, "persistent", "plain", subscription]:
            return (f"plain {subscription}", "regular") if subscription == "stream" else (f"plain {subscription}",)
        case ["managed-ledgers", _, _, "persistent", *_]:
            return ("part",)
        case ["managed-ledgers", _, _, "segment", topic, _] | ["managed-ledgers", _, _, "segment", topic, _, "pulsar.dedup"]:
            return (topic,)
        case ["managed-ledgers", _, _, "segment", topic, _, "other"]:
            return (topic,)
        case ["regular-topics", *_]:
            return ("regular",)
        case ["schemas", _, _, name]:
            return ("part" if name == "parted" else "plain",)
        case ["sinks", *_]:
            return ("sink",)
        case ["topics", _, _, topic] | ["topics", _, _, topic, "controller"]:
            return (topic, "stream")
        case ["topics", _, _, topic, "subscriptions", "other"]:
            return (topic,)
        case ["topics", _, _, _, "subscriptions", "stream"]:
            return ("stream",)
        case ["txn", *_] | ["txn-op", *_] | ["txn-aborted", *_]:
            return ("plain",)
        case ["txn-serial", *_]:
            return ("fine transaction", "sink")
        case ["txn-tc", *_]:
            return ("fine transaction", "sink", START)
        case [ledger] if ledger.startswith(LEDGER):
            return ("plain", "part", "scaled")
    return ()


def faults(key: str, outcome: Outcome, kept: Kept, usual: Outcome) -> list[str]:
    """What must not be, in words. `usual` is the outcome without an edit."""
    found = [f"crash: {each}" for each in outcome.logged.crashes if _name(key) not in each]
    allowed = (*may_refuse(key), "page")
    is_told = any(_name(key) in line for line in outcome.logged.lines)
    for what, error in outcome.refusals.items():
        is_held_up = error == NO_ANSWER and is_told and kind_of(key) in HOLD_UP
        if is_held_up and what.startswith(allowed):
            continue
        if not what.startswith(allowed) or STATUS_500 in error or error == NO_ANSWER:
            found.append(f"{what}: {error}")
        elif not is_told and _name(key) not in error and not _names_subscription(key, error):
            found.append(f"{what} does not name the record: {error}")
    gone = usual.kept & set(kept.keys()) - outcome.kept - {key}
    if kind_of(key) in ("subscription", "subscription of a regular topic"):
        # One that can be read and is of another time than its consumers is another subscription (INV5).
        gone = {each for each in gone if not each.startswith(f"{key}/")}
    gone = {each for each in gone if kind_of(each) not in RUN_OUT}
    lost = {each for each in usual.ledgers & kept.ledgers.keys() - outcome.ledgers if kept.holds_messages(each)}
    if kind_of(key) == "namespace":  # it can be read, and has fewer policies: no deduplication, no retention of what was read
        gone, lost = {each for each in gone if not each.endswith("/pulsar.dedup") and "/segment/" not in each}, set()
    if gone:
        found.append(f"records deleted: {sorted(gone)}")
    if lost:
        found.append(f"ledgers deleted: {sorted(lost)}")
    return found


def _name(key: str) -> str:
    return key.removeprefix(LEDGER) if key.startswith(LEDGER) else key


def _names_subscription(key: str, error: str) -> bool:
    """It can be read, and says something else than it did: then the error is about the subscription, not about its record."""
    *_, tenant, namespace, topic, word, name = ["", "", "", *key.split("/")]
    return word == "subscriptions" and f"ubscription {name} of topic://{tenant}/{namespace}/{topic}" in error
