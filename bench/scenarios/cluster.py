"""Several brokers: lookups and redirects, how long a topic is away when its broker goes; and what ten thousand topics cost.

Lookups and idle topics are measured on a process of their own from outside. Failover runs three brokers in this process: one of
them is to be killed without the others. Its session must run out before they may take its topics, so the time is given against
the session's timeout.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
import urllib.request

import msgspec
from bench.broker_process import Process, cpu_seconds, fresh_dir, rss_bytes, start_broker
from bench.jobs import Job
from bench.link import Link
from bench.report import Figure
from bench.scenarios.bench_run import Run
from bench.shapes import Shape

import braid
from braid.errors import BraidError
from braid.model.names import TopicName
from braid.testing.broker import InProcessBroker
from braid.web.config import StandaloneConfig
from braid.wire import requests
from braid.wire.commands import decode
from braid.wire.messages import CommandLookupTopicResponse
from braid.wire.types import CommandType

LOOKUP_GROUP = "Lookups: three brokers in one process, asked at the first"
FAILOVER_GROUP = "Failover: time from the event to the next acknowledged message, three brokers"
TOPICS_GROUP = "Ten thousand idle topics"
MB = 1 << 20
NAMES = 1000
TIMEOUTS = (2.0, 5.0)


class LookupLink(Link):
    """Counts which answers came."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: dict[int, int] = {}

    def _take(self, kind: int, raw: bytes) -> None:
        if kind == CommandType.LOOKUP_RESPONSE:
            command = decode(raw)
            response: int = command.body.response if command is not None else -1
            self.kinds[response] = self.kinds.get(response, 0) + 1
        super()._take(kind, raw)


def measure(run: Run) -> None:
    _measure_lookups(run)
    _measure_failover(run)
    _measure_topics(run)


def _measure_lookups(run: Run) -> None:
    with start_broker(fresh_dir("lookups"), brokers=3).wait_ready() as broker:
        figures = asyncio.run(_lookups(broker, 5_000 if run.is_quick else 20_000))
    run.add(figures)


async def _lookups(broker: Process, count: int) -> list[Figure]:
    job = Job(mode="publish", port=broker.port, pid=broker.pid, shape=Shape(batch=1, size=100, topics=1), prefix="x", entries=1)
    link = await LookupLink.open(job)
    assert isinstance(link, LookupLink)
    names = [f"persistent://public/default/lookup-{number}" for number in range(NAMES)]
    await link.requests([requests.lookup(number, name, authoritative=True) for number, name in enumerate(names[:1])])
    mine: list[str] = []
    others: list[str] = []
    for number, name in enumerate(names):
        link.kinds.clear()
        await link.requests([requests.lookup(number, name)])
        (mine if link.kinds.get(CommandLookupTopicResponse.Connect) else others).append(name)
    figures = []
    for what, chosen in (("of topics it owns", mine), ("answered with a redirect", others)):
        if not chosen:
            continue
        frames = [requests.lookup(number, chosen[number % len(chosen)]) for number in range(count)]
        cpu, started = cpu_seconds(broker.pid), time.perf_counter()
        await link.requests(frames)
        seconds = time.perf_counter() - started
        each = (cpu_seconds(broker.pid) - cpu) / count * 1e6
        note = f"{each:.0f} us of CPU each; {len(chosen)} of {NAMES} topics"
        figures.append(Figure(group=LOOKUP_GROUP, name=f"lookups {what}", value=count / seconds, unit="per second", note=note))
    link.close()
    return figures


def _measure_failover(run: Run) -> None:
    figures = []
    for timeout in TIMEOUTS[:1] if run.is_quick else TIMEOUTS:
        run.progress(f"failover with a session timeout of {timeout} s")
        gaps = [asyncio.run(_failover(timeout, "kill")) for _ in range(2 if run.is_quick else 3)]
        figures.append(_gap(f"owner killed, session timeout {timeout:.0f} s", gaps, target=timeout + 3))
    for event in ("transfer", "stop"):
        gaps = [asyncio.run(_failover(TIMEOUTS[0], event)) for _ in range(2 if run.is_quick else 3)]
        figures.append(_gap({"transfer": "bundle handed to another broker", "stop": "owner stopped cleanly"}[event], gaps))
    run.add(figures)


def _gap(name: str, gaps: list[float], target: float | None = None) -> Figure:
    middle = statistics.median(gaps)
    return Figure(group=FAILOVER_GROUP, name=name, value=middle, unit="s", low=min(gaps), high=max(gaps), target=target)


async def _failover(session_timeout: float, event: str) -> float:
    """Seconds without an acknowledgment around the event."""
    config = StandaloneConfig()
    config = msgspec.structs.replace(
        config, storage=msgspec.structs.replace(config.storage, session_timeout_seconds=session_timeout)
    )
    async with InProcessBroker(config=config, durable=True, brokers=3) as cluster:
        topic = await _topic_of_broker(cluster, 1)
        async with braid.connect(cluster.service_url) as client, client.producer(topic) as producer:
            await producer.send(b"before")
            happened = asyncio.Event()
            first_after = asyncio.create_task(_first_acknowledged(producer, happened))
            started = time.perf_counter()
            node = cluster.nodes[1]
            happened.set()
            if event == "kill":
                await cluster.kill(1)
            elif event == "transfer":
                name = TopicName.parse(topic)
                bundles = node.service.ownership.owned()[name.namespace]
                for bundle in bundles:
                    await node.service.ownership.unload(name.namespace, bundle, destination=cluster.nodes[2].broker_id)
            else:
                await node.__aexit__(None, None, None)
            return await first_after - started


async def _first_acknowledged(producer: braid.Producer, happened: asyncio.Event) -> float:
    """When the first message that was sent after the event was acknowledged."""
    await happened.wait()
    await asyncio.sleep(0.05)  # the event itself must have begun
    while True:
        with contextlib.suppress(BraidError):
            await producer.send(b"after")
            return time.perf_counter()
        await asyncio.sleep(0.01)


async def _topic_of_broker(cluster: InProcessBroker, number: int) -> str:
    """A topic that this broker serves."""
    service = cluster.nodes[number].service
    for candidate in range(1000):
        topic = f"persistent://public/default/failover-{candidate}"
        found = await service.ownership.find(TopicName.parse(topic), authoritative=candidate == 0)
        if found.is_mine:
            return topic
    raise RuntimeError(f"No topic could be given to broker {number}.")


def _measure_topics(run: Run) -> None:
    count = 2_000 if run.is_quick else 10_000
    with start_broker(fresh_dir("many")).wait_ready() as broker:
        empty = rss_bytes(broker.pid)
        started = time.perf_counter()
        asyncio.run(_load_topics(broker, count))
        loaded_seconds = time.perf_counter() - started
        time.sleep(2)
        loaded = rss_bytes(broker.pid)
        cpu, started = cpu_seconds(broker.pid), time.perf_counter()
        time.sleep(3 if run.is_quick else 10)
        share = (cpu_seconds(broker.pid) - cpu) / (time.perf_counter() - started) * 100
        label = f"{count:,} topics"
        figures = [
            Figure(group=TOPICS_GROUP, name=f"{label}: loaded in", value=loaded_seconds, unit="s"),
            Figure(
                group=TOPICS_GROUP,
                name=f"{label}: RSS",
                value=loaded / MB,
                unit="MB",
                note=f"{(loaded - empty) / count / 1024:.1f} kB each beyond {empty / MB:.0f} MB",
            ),
            Figure(group=TOPICS_GROUP, name=f"{label}: CPU while nothing happens", value=share, unit="% of core"),
        ]
        for what, path in (
            ("list", "/admin/v2/persistent/public/default"),
            ("stats of all", "/admin/v2/broker-stats/topics"),
            ("metrics", "/metrics"),
        ):
            seconds, size = _fetched(broker.http_url + path)
            figures.append(
                Figure(
                    group=TOPICS_GROUP, name=f"{label}: {what}", value=seconds * 1000, unit="ms", note=f"{size / 1000:,.0f} kB"
                )
            )
    run.add(figures)


async def _load_topics(broker: Process, count: int) -> None:
    job = Job(mode="publish", port=broker.port, pid=broker.pid, shape=Shape(batch=1, size=100, topics=1), prefix="x", entries=1)
    link = await Link.open(job)
    await link.requests(
        [requests.producer(number, number, f"persistent://public/default/idle-{number}") for number in range(count)]
    )
    link.close()


def _fetched(url: str) -> tuple[float, int]:
    started = time.perf_counter()
    with urllib.request.urlopen(url, timeout=120) as response:
        size = len(response.read())
    return time.perf_counter() - started, size
