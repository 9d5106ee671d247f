"""`braid top`: rates, backlog and owners of topics and brokers, looked at again and again.

Asks every broker what it serves and adds it up. Rates come from the counters of two looks. A broker that does not answer is
shown as such and does not stop the others. Bounded in rows shown and in brokers asked at a time.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from braid.cli.admin_output import backlog, console, print_tables, show, table
from braid.cli.output import printable
from braid.client.admin import AdminClient
from braid.client.admin_types import TopicStats
from braid.errors import BraidError, ConfigError, ConnectFailed, NotFound
from braid.model.names import NamespaceName
from braid.runtime.clock import Clock, SystemClock

if TYPE_CHECKING:
    from rich.console import RenderableType

AT_ONCE = 16
"""Brokers asked at the same time."""
NARROW_COLUMNS = 120
"""A terminal with fewer columns is shown less of each topic, so that names stay readable."""


class TopOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for on the command line."""

    interval: float
    sort: str
    rows: int
    namespace: str | None
    is_once: bool
    url: str
    is_json: bool
    timeout: float


class TopicRow(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One topic or partition."""

    topic: str
    owner: str
    rate_in: float
    rate_out: float
    bytes_in: float
    bytes_out: float
    backlog: int
    storage_size: int
    producers: int
    subscriptions: int
    consumers: int


class BrokerRow(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One broker, all its topics added up."""

    broker: str
    state: str
    is_leader: bool
    topics: int
    bundles: int
    rate_in: float
    rate_out: float
    backlog: int


class Look(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What there was to see between two looks."""

    brokers: list[BrokerRow]
    topics: list[TopicRow]
    """The first ones in the chosen order."""
    total_topics: int
    warnings: list[str]
    """What the brokers want looked at."""


class _Seen(msgspec.Struct, frozen=True):
    """What one broker said at one time."""

    state: str
    bundles: int
    topics: dict[str, TopicStats]
    warnings: list[str]


SORTS: dict[str, Callable[[TopicRow], Any]] = {
    "in": lambda row: (-row.rate_in, row.topic),
    "out": lambda row: (-row.rate_out, row.topic),
    "backlog": lambda row: (-row.backlog, row.topic),
    "size": lambda row: (-row.storage_size, row.topic),
    "topic": lambda row: row.topic,
}


def run(options: TopOptions) -> None:
    """Show the cluster until Ctrl-C, or once."""
    if not options.is_once and (options.is_json or not sys.stdout.isatty()):
        raise ConfigError("braid top rewrites a terminal's screen; for a file, a pipe or JSON add --once.")
    if options.namespace is not None:
        NamespaceName.parse(options.namespace)
    try:
        asyncio.run(_watch(options))
    except ConnectFailed as error:
        raise ConnectFailed(f"{error.message} (--url or BRAID_ADMIN_URL)") from error


async def _watch(options: TopOptions) -> None:
    clock = SystemClock()
    async with Watcher(options, clock) as watcher:
        if options.is_once:
            await watcher.look()
            await clock.sleep(options.interval)
            found = await watcher.look()
            if options.is_json:
                show(found, is_json=True)
            else:
                print_tables(_screen(found, console().width))
            return
        await _live(options, clock, watcher)


async def _live(options: TopOptions, clock: Clock, watcher: Watcher) -> None:
    from rich.console import Group
    from rich.live import Live

    with Live(console=console(), screen=True, auto_refresh=False) as live:
        while True:
            live.update(Group(*_screen(await watcher.look(), live.console.width)), refresh=True)
            await clock.sleep(options.interval)


class Watcher:
    """Looks at all brokers; remembers the last look for the rates."""

    def __init__(self, options: TopOptions, clock: Clock) -> None:
        self._options = options
        self._clock = clock
        self._admin = AdminClient(options.url, timeout=options.timeout)
        self._stack = AsyncExitStack()
        self._brokers: dict[str, AdminClient] = {}
        self._before: dict[str, TopicStats] = {}
        self._before_at = 0.0

    async def __aenter__(self) -> Watcher:
        await self._stack.enter_async_context(self._admin)
        return self

    async def __aexit__(self, *_ended: object) -> None:
        await self._stack.aclose()

    async def look(self) -> Look:
        """Ask all brokers; rates are those since the last look, 0 at the first."""
        names = await self._admin.brokers.list()
        try:
            leader = (await self._admin.brokers.leader()).broker_id
        except BraidError:  # between two leaders there is none
            leader = ""
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(name: str) -> _Seen:
            async with gate:
                return await self._ask(await self._client(name, is_only=len(names) == 1))

        seen = dict(zip(names, await asyncio.gather(*map(one, names)), strict=True))
        now = self._clock.monotonic()
        rows = {
            name: [self._row(name, topic, stats, now) for topic, stats in each.topics.items()] for name, each in seen.items()
        }
        self._before = {topic: stats for each in seen.values() for topic, stats in each.topics.items()}
        self._before_at = now
        topics = sorted((row for each in rows.values() for row in each), key=SORTS[self._options.sort])
        brokers = [_broker_row(name, seen[name], rows[name], name == leader) for name in sorted(names)]
        warnings = [f"{name}: {text}" for name in sorted(names) for text in seen[name].warnings]
        return Look(brokers=brokers, topics=topics[: self._options.rows], total_topics=len(topics), warnings=warnings)

    async def _client(self, name: str, *, is_only: bool) -> AdminClient:
        """A client for one broker. A sole broker is asked where the user asked, which may be a tunnel."""
        if is_only:
            return self._admin
        if name not in self._brokers:
            scheme = urlsplit(self._admin.urls[0]).scheme
            client = AdminClient(f"{scheme}://{name}", timeout=self._options.timeout)
            self._brokers[name] = await self._stack.enter_async_context(client)
        return self._brokers[name]

    async def _ask(self, client: AdminClient) -> _Seen:
        try:
            namespaces = await client.brokers.topics()
            bundles = (await client.brokers.load()).num_bundles
            warnings = await self._warnings(client)
        except BraidError as error:
            return _Seen(f"no answer: {error.message}", 0, {}, [])
        wanted = self._options.namespace
        topics = {
            topic: stats
            for name, found in namespaces.items()
            if wanted is None or name == wanted
            for bundle in found.values()
            for kind in bundle.values()
            for topic, stats in kind.items()
        }
        return _Seen("up", bundles, topics, warnings)

    async def _warnings(self, client: AdminClient) -> list[str]:
        try:
            return list(await client.brokers.warnings())
        except NotFound:  # an older broker has none
            return []

    def _row(self, owner: str, topic: str, stats: TopicStats, now: float) -> TopicRow:
        before, seconds = self._before.get(topic, stats), now - self._before_at

        def rate(count: int, earlier: int) -> float:
            # A counter begins anew when the topic moves.
            return 0.0 if count <= earlier or seconds <= 0 else round((count - earlier) / seconds, 3)

        return TopicRow(
            topic=topic,
            owner=owner,
            rate_in=rate(stats.msg_in_counter, before.msg_in_counter),
            rate_out=rate(stats.msg_out_counter, before.msg_out_counter),
            bytes_in=rate(stats.bytes_in_counter, before.bytes_in_counter),
            bytes_out=rate(stats.bytes_out_counter, before.bytes_out_counter),
            backlog=backlog(stats),
            storage_size=stats.storage_size,
            producers=len(stats.publishers),
            subscriptions=len(stats.subscriptions),
            consumers=sum(len(each.consumers) for each in stats.subscriptions.values()),
        )


def _broker_row(name: str, seen: _Seen, rows: list[TopicRow], is_leader: bool) -> BrokerRow:
    return BrokerRow(
        broker=name,
        state=seen.state,
        is_leader=is_leader,
        topics=len(rows),
        bundles=seen.bundles,
        rate_in=round(math.fsum(row.rate_in for row in rows), 3),
        rate_out=round(math.fsum(row.rate_out for row in rows), 3),
        backlog=sum(row.backlog for row in rows),
    )


def _screen(look: Look, width: int) -> Iterator[RenderableType]:
    from rich.text import Text

    columns = ("broker", "state", "leader", "topics", "bundles", "in/s", "out/s", "backlog")
    rows = [
        (each.broker, each.state, each.is_leader, each.topics, each.bundles, each.rate_in, each.rate_out, each.backlog)
        for each in look.brokers
    ]
    yield table(columns, rows)
    for text in look.warnings:
        yield Text(printable(text), style="red")
    title = f"{len(look.topics):,} of {look.total_topics:,} topics" if look.total_topics > len(look.topics) else ""
    topics: list[tuple[Any, ...]]
    if width < NARROW_COLUMNS:
        topics = [
            (each.topic.removeprefix("persistent://"), each.owner, each.rate_in, each.rate_out, each.backlog)
            for each in look.topics
        ]
        yield table(("topic", "owner", "in/s", "out/s", "backlog"), topics, title)
        return
    topics = [
        (each.topic, each.owner, each.rate_in, each.rate_out, each.backlog, each.storage_size, each.producers, each.consumers)
        for each in look.topics
    ]
    yield table(("topic", "owner", "in/s", "out/s", "backlog", "bytes", "producers", "consumers"), topics, title)
