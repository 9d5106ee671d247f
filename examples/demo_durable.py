"""First act of `make demo`: real Pulsar clients, a kill -9, and nothing lost.

Publishes keyed orders with the official Pulsar client from several producers, kills the broker with SIGKILL while sends are in
flight, restarts it on the same data, and lets a consumer read everything.
"""

from __future__ import annotations

import json
import os
import threading
import time
import urllib.request
from collections.abc import Callable

import pulsar
from examples.demo_broker import Broker, say

PRODUCERS = 4
MESSAGES = 5000
TOPIC = "persistent://public/default/payments"


class OrderProducer(threading.Thread):
    """Sends numbered orders and notes which of them the broker acknowledged, in order."""

    def __init__(self, client: pulsar.Client, number: int) -> None:
        super().__init__(name=f"producer-{number}")
        self._number = number
        self._producer = client.create_producer(
            TOPIC,
            producer_name=self.name,
            block_if_queue_full=True,
            batching_enabled=number % 2 == 0,
            send_timeout_millis=60_000,
        )
        self.acknowledged: list[int] = []
        self.failed = 0

    def _callback(self, sequence: int) -> Callable[[pulsar.Result, object], None]:
        def done(result: pulsar.Result, _message_id: object) -> None:
            if result == pulsar.Result.Ok:
                self.acknowledged.append(sequence)
            else:
                self.failed += 1

        return done

    def run(self) -> None:
        for sequence in range(MESSAGES):
            order = {"producer": self._number, "sequence": sequence, "amount": sequence % 97}
            self._producer.send_async(
                json.dumps(order).encode(), self._callback(sequence), partition_key=f"user-{sequence % 50}"
            )
        self._producer.flush()
        self._producer.close()


def read_all(client: pulsar.Client) -> dict[int, list[int]]:
    """Everything in the topic, per producer in order of arrival, acknowledging as it goes."""
    consumer = client.subscribe(TOPIC, "demo", consumer_type=pulsar.ConsumerType.Exclusive)
    seen: dict[int, list[int]] = {number: [] for number in range(PRODUCERS)}
    while True:
        try:
            message = consumer.receive(3000)
        except pulsar.Timeout:
            consumer.close()
            return seen
        order = json.loads(message.data())
        seen[order["producer"]].append(order["sequence"])
        consumer.acknowledge(message)


def first_occurrences(sequences: list[int]) -> list[int]:
    return list(dict.fromkeys(sequences))


def deduplicate(broker: Broker) -> None:
    """Turn deduplication on, so that messages the client sends again after the kill are stored once."""
    request = urllib.request.Request(
        f"{broker.http_url}/admin/v2/namespaces/public/default/deduplication",
        data=b"true",
        method="POST",
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as reply:
        say(f"deduplication switched on over REST: HTTP {reply.status}")


def run(broker: Broker) -> bool:
    """Whether everything that was acknowledged came out, once and in order."""
    deduplicate(broker)
    client = pulsar.Client(broker.service_url, logger=pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull))
    client.subscribe(TOPIC, "demo").close()  # the subscription exists from here on, so nothing may be lost to it
    producers = [OrderProducer(client, number) for number in range(PRODUCERS)]
    say(f"{PRODUCERS} producers send {MESSAGES} messages each, half of them batched")
    started = time.monotonic()
    for producer in producers:
        producer.start()
    while sum(len(producer.acknowledged) for producer in producers) < PRODUCERS * MESSAGES // 4:
        time.sleep(0.01)
    in_flight = PRODUCERS * MESSAGES - sum(len(producer.acknowledged) for producer in producers)
    say(f"a quarter is acknowledged, {in_flight} messages are queued or in flight: now kill -9")
    broker.kill_and_restart()
    for producer in producers:
        producer.join()
    seconds = time.monotonic() - started
    say(f"all producers done after {seconds:.1f} s, the kill and the restart included")
    seen = read_all(client)
    client.close()

    print(f"\n{'producer':>10} {'acknowledged':>13} {'failed':>7} {'delivered':>10} {'lost':>5} {'doubled':>8} {'in order':>9}")
    good = True
    for producer, (number, sequences) in zip(producers, sorted(seen.items()), strict=True):
        lost = len(set(producer.acknowledged) - set(sequences))
        doubled = len(sequences) - len(set(sequences))
        in_order = first_occurrences(sequences) == sorted(set(sequences))
        good = good and lost == 0 and doubled == 0 and in_order and producer.failed == 0
        print(
            f"{number:>10} {len(producer.acknowledged):>13} {producer.failed:>7} {len(sequences):>10} {lost:>5} {doubled:>8} "
            f"{'yes' if in_order else 'NO':>9}"
        )
    print(f"\n{'VERIFIED' if good else 'FAILED'}: {sum(map(len, seen.values())):,} messages read back after the kill.")
    return good
