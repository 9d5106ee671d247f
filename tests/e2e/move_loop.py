"""Three brokers, ownership moving all the time under load, one broker killed and one paused past its session.

    python tests/e2e/move_loop.py --seconds 60 [--seed 1] [--interval 1.0]

Real Pulsar clients publish with deduplication on and consume while bundles are unloaded and transferred at random. One broker
is killed (another joins), one is paused until its session has run out and its bundles were taken over, then resumed. In the end
each topic is read from the start: every acknowledged message is there, once, in the order it was sent. Exit code 0 if so.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import sys
import threading
import time
from itertools import pairwise
from typing import Any

import msgspec
import pulsar

from braid.broker.config import BrokerConfig
from braid.errors import BraidError
from braid.model.names import NamespaceName, TopicName
from braid.testing.broker import BackgroundBroker
from braid.web.config import StandaloneConfig, StorageConfig
from braid.web.node import BrokerNode

SESSION_SECONDS = 2.0
TOPICS = 8
RATE = 250
"""Messages per second and topic, at most."""
NAMESPACE = NamespaceName.parse("public/default")


class Report(msgspec.Struct):
    """What was done and what was found."""

    sent: int = 0
    acknowledged: int = 0
    stored: int = 0
    lost: int = 0
    duplicated: int = 0
    disordered: int = 0
    unseen: int = 0
    """Acknowledged messages that the consumer running all the time never got."""
    moves: int = 0
    losses: int = 0
    longest_pause: float = 0.0
    """Seconds between two receipts of one topic."""

    @property
    def is_clean(self) -> bool:
        return self.sent > 0 and self.moves > 0 and not (self.lost or self.duplicated or self.disordered or self.unseen)


class Sender(threading.Thread):
    """Numbers 0, 1, 2, ... to one topic; a client that sends again after each reconnection, for ever."""

    def __init__(self, client: pulsar.Client, topic: str, stop: threading.Event) -> None:
        super().__init__(name=f"send {topic}", daemon=True)
        self.topic = topic
        self.sent = 0
        self.acknowledged: set[int] = set()
        self.longest_pause = 0.0
        self.failure: str = ""
        self._last = time.monotonic()
        self._stop_it = stop
        self._producer = client.create_producer(
            topic,
            producer_name=f"p-{topic}",
            send_timeout_millis=0,
            block_if_queue_full=True,
            max_pending_messages=200,
            batching_enabled=False,
        )

    def run(self) -> None:
        while not self._stop_it.is_set():
            number = self.sent
            self._producer.send_async(b"%d" % number, lambda result, _id, number=number: self._answered(result, number))
            self.sent += 1
            time.sleep(1 / RATE)

    def _answered(self, result: Any, number: int) -> None:
        now = time.monotonic()
        self.longest_pause = max(self.longest_pause, now - self._last)
        self._last = now
        if result == pulsar.Result.Ok:
            self.acknowledged.add(number)
        else:
            self.failure = f"message {number}: {result}"

    def finish(self) -> None:
        self.join()
        self._producer.flush()
        self._producer.close()


class Receiver(threading.Thread):
    """Consumes one topic all the time; what it gets again after a move is not counted twice."""

    def __init__(self, client: pulsar.Client, topic: str, stop: threading.Event) -> None:
        super().__init__(name=f"receive {topic}", daemon=True)
        self.topic = topic
        self.seen: set[int] = set()
        self._stop_it = stop
        self._consumer = client.subscribe(topic, "live", initial_position=pulsar.InitialPosition.Earliest)

    def run(self) -> None:
        while not self._stop_it.is_set():
            try:
                message = self._consumer.receive(timeout_millis=500)
            except pulsar.Timeout:
                continue
            self.seen.add(int(message.data()))
            self._consumer.acknowledge(message)


class Loop:
    """One run."""

    def __init__(self, seconds: float, interval: float, seed: int) -> None:
        self.seconds = seconds
        self.interval = interval
        self.chance = random.Random(seed)
        self.cluster: BackgroundBroker
        self.gone: set[int] = set()
        """Brokers that are killed or paused."""

    def run(self) -> Report:
        config = StandaloneConfig(
            broker=BrokerConfig(
                deduplication=True,
                reconcile_seconds=0.5,
                balance_seconds=3.0,
                default_bundles=8,
                retention_minutes=-1,  # the topics are read from the start in the end
                retention_mb=-1,
            ),
            storage=StorageConfig(session_timeout_seconds=SESSION_SECONDS),
        )
        topics = [f"moving-{number}" for number in range(TOPICS)]
        with BackgroundBroker(brokers=3, durable=True, config=config, with_http=False) as self.cluster:
            client = self._client()
            stop_sending, stop_receiving = threading.Event(), threading.Event()
            senders = [Sender(client, topic, stop_sending) for topic in topics]
            receivers = [Receiver(client, topic, stop_receiving) for topic in topics]
            for thread in (*senders, *receivers):
                thread.start()
            self._trouble()
            stop_sending.set()
            for sender in senders:
                sender.finish()
            self._wait_for(receivers, senders)
            stop_receiving.set()
            for receiver in receivers:
                receiver.join()
            report = self._verify(senders, receivers)
            client.close()
        return report

    def _client(self) -> pulsar.Client:
        """It looks topics up at broker 0, which lives: after a few refused connections this client waits half a minute."""
        return pulsar.Client(
            self.cluster.service_url,
            logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error),
            operation_timeout_seconds=60,
            connection_timeout_ms=2000,
        )

    def _trouble(self) -> None:
        """Moves all the time; a kill after a third, a pause after a half."""
        begin = time.monotonic()
        events = [(self.seconds * 0.3, self._kill), (self.seconds * 0.5, self._pause)]
        while (passed := time.monotonic() - begin) < self.seconds:
            if events and passed >= events[0][0]:
                events.pop(0)[1]()
            self.cluster.run(self._move())
            time.sleep(self.interval)

    async def _move(self) -> None:
        """Unload one bundle, most often to somebody in particular."""
        nodes = self._up()
        holding = [node for node in nodes if node.service.ownership.owned()]
        if not holding:
            return
        node = self.chance.choice(holding)
        bundle = self.chance.choice(node.service.ownership.owned()[NAMESPACE])
        others = [each.broker_id for each in nodes if each is not node]
        destination = self.chance.choice([*others, None])
        try:
            await node.service.ownership.unload(NAMESPACE, bundle, destination=destination)
        except BraidError as error:
            logging.getLogger(__name__).info("a move was refused: %s", error)

    def _up(self) -> list[BrokerNode]:
        return [node for number, node in enumerate(self.cluster.broker.nodes) if number not in self.gone]

    def _kill(self) -> None:
        """The end of broker 2; another joins."""
        self.gone.add(2)
        self.cluster.kill(2)
        self.cluster.run(self.cluster.broker.add_broker())

    def _pause(self) -> None:
        """Broker 1 misses the end of its session; others take what it has while it still serves its clients."""
        paused = self.cluster.broker.nodes[1]
        self.cluster.run(self._give_to(paused))
        self.gone.add(1)
        self.cluster.pause(1)
        time.sleep(SESSION_SECONDS + 0.5)
        self.cluster.run(self._take_from(paused))
        time.sleep(1.0)
        self.cluster.resume(1)
        self.gone.discard(1)

    async def _give_to(self, node: BrokerNode) -> None:
        """Make sure that it has something to lose."""
        giver = max(self._up(), key=lambda each: len(each.service.ownership.owned().get(NAMESPACE, [])))
        if giver is not node:
            bundle = giver.service.ownership.owned()[NAMESPACE][0]
            await giver.service.ownership.unload(NAMESPACE, bundle, destination=node.broker_id)
        async with asyncio.timeout(10):
            while not (node.service.ownership.owned() and node.service.topics):  # noqa: ASYNC110 - real time
                await asyncio.sleep(0.05)

    async def _take_from(self, paused: BrokerNode) -> None:
        taker = self._up()[0].service
        for name in list(paused.service.topics):
            for _attempt in range(50):
                try:
                    found = await taker.ownership.find(TopicName.parse(name), authoritative=True)
                    if found.is_mine:
                        await taker.topic(TopicName.parse(name), create=False)
                    break
                except BraidError:
                    await asyncio.sleep(0.1)

    def _wait_for(self, receivers: list[Receiver], senders: list[Sender]) -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            if all(sender.acknowledged <= receiver.seen for sender, receiver in zip(senders, receivers, strict=True)):
                return
            time.sleep(0.1)

    def _verify(self, senders: list[Sender], receivers: list[Receiver]) -> Report:
        report = Report()
        client = self._client()
        for sender, receiver in zip(senders, receivers, strict=True):
            if sender.failure:
                raise AssertionError(f"{sender.topic}: {sender.failure}")
            numbers = _read_all(client, sender.topic)
            report.sent += sender.sent
            report.acknowledged += len(sender.acknowledged)
            report.stored += len(numbers)
            report.lost += len(sender.acknowledged - set(numbers))
            report.duplicated += len(numbers) - len(set(numbers))
            report.disordered += sum(b <= a for a, b in pairwise(numbers))
            report.unseen += len(sender.acknowledged - receiver.seen)
            report.longest_pause = max(report.longest_pause, sender.longest_pause)
        client.close()
        for node in self.cluster.broker.nodes:
            report.moves += node.service.ownership.holdings.moves
            report.losses += node.service.ownership.holdings.losses
        return report


def _read_all(client: pulsar.Client, topic: str) -> list[int]:
    """Everything stored in a topic, in order."""
    reader = client.create_reader(topic, pulsar.MessageId.earliest)
    numbers: list[int] = []
    try:
        while reader.has_message_available():
            numbers.append(int(reader.read_next(timeout_millis=10_000).data()))
    finally:
        reader.close()
    return numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two moves")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    report = Loop(options.seconds, options.interval, options.seed).run()
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(report)).decode() + "\n")
    sys.exit(0 if report.is_clean else 1)


if __name__ == "__main__":
    main()
