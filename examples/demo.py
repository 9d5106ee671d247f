"""The demonstration behind `make demo`: a durable broker, real Pulsar clients, a kill -9, and a verified result.

Starts `braid standalone`, publishes keyed orders with the official Pulsar client from several producers, kills the broker
with SIGKILL while sends are in flight, restarts it on the same data, and lets a consumer read everything. The result is
compared with what the producers were promised; the exit code says whether it held.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pulsar

PRODUCERS = 4
MESSAGES = 5000
TOPIC = "persistent://public/default/orders"


class Broker:
    """One `braid standalone` process."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._ports = (0, 0)
        self.service_url = self.http_url = ""
        self._process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        braid = Path(sys.executable).parent / "braid"
        port, http_port = self._ports
        command = [
            str(braid),
            "standalone",
            "--data-dir",
            str(self._data_dir),
            "--port",
            str(port),
            "--http-port",
            str(http_port),
        ]
        started = time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        line = process.stdout.readline().split() if process.stdout else []
        if len(line) != 3:
            sys.exit("The broker did not start; run `braid standalone` by hand to see why.")
        self.service_url, self.http_url = line[1], line[2]
        self._ports = (int(line[1].rpartition(":")[2]), int(line[2].rpartition(":")[2]))
        say(f"broker ready at {self.service_url} after {1000 * (time.monotonic() - started):.0f} ms")
        return process

    def kill_and_restart(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        say("broker killed with SIGKILL; restarting it on the same data")
        self._process = self._start()

    def stop(self) -> int:
        self._process.terminate()
        return self._process.wait(30)


def say(text: str) -> None:
    print(f"  {text}", flush=True)


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


def main() -> int:
    data_dir = Path(tempfile.mkdtemp(prefix="braid-demo-"))
    print("Braid demo: a durable broker under real Pulsar clients")
    try:
        return run(data_dir)
    finally:
        shutil.rmtree(data_dir, ignore_errors=True)


def run(data_dir: Path) -> int:
    broker = Broker(data_dir)
    deduplicate(broker)
    client = pulsar.Client(broker.service_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
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
    code = broker.stop()

    print(f"\n{'producer':>10} {'acknowledged':>13} {'failed':>7} {'delivered':>10} {'lost':>5} {'doubled':>8} {'in order':>9}")
    good = code == 0
    for producer, (number, sequences) in zip(producers, sorted(seen.items()), strict=True):
        lost = len(set(producer.acknowledged) - set(sequences))
        doubled = len(sequences) - len(set(sequences))
        in_order = first_occurrences(sequences) == sorted(set(sequences))
        good = good and lost == 0 and doubled == 0 and in_order and producer.failed == 0
        print(
            f"{number:>10} {len(producer.acknowledged):>13} {producer.failed:>7} {len(sequences):>10} {lost:>5} {doubled:>8} "
            f"{'yes' if in_order else 'NO':>9}"
        )
    print(f"\n{'VERIFIED' if good else 'FAILED'}: {sum(map(len, seen.values()))} messages read back after the kill.")
    print("Look around yourself:")
    print("  .venv/bin/braid standalone --data-dir data")
    print("  .venv/bin/braid produce my-topic --messages 1000")
    print("  .venv/bin/braid consume my-topic --subscription me --from earliest --count 1000")
    return 0 if good else 1


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
