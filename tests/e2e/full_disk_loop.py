"""Producers that keep trying on a file system that is nearly full, emptied a little and filled again: memory, log, answers.

Mounts a tmpfs in a mount namespace of its own (a user namespace too unless started by root; nothing is left behind), starts
`braid standalone` on it and lets producers of the SDK and of the official client send messages of 1 MB without end. Every
`--turn` seconds a ballast of 20 MB comes or goes, every third turn a topic is deleted. One line per `--sample` seconds: memory,
free space, lines in the broker's log, what each client was answered, changes of `braid_storage_writable`. At the end the topics
and the ballast go: the producers have to store again by themselves, and new clients to read what they store.

Ends with 1 if the memory passes `--rss`, the log has more lines than a line per change and minute, a client was never told
that the disk is full, or one does not recover.

    python -m tests.e2e.full_disk_loop --seconds 600
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pulsar

import braid
from braid.errors import BraidError, TopicNotFound

MESSAGE = os.urandom(1_000_000)
BALLAST = bytes(20 << 20)
AT_ONCE = 10
"""Messages that a producer sends before it looks at the answers."""
PAUSE = 0.2
SDK_TOPICS = ("persistent://public/default/full-0", "topic://public/default/full-1")
OFFICIAL_TOPIC = "persistent://public/default/full-2"
CLIENTS = ("sdk", "official")
RECOVERY_SECONDS = 60.0


class Watched:
    """A broker process on the small disk, its log and what was seen of it."""

    def __init__(self, disk: Path) -> None:
        self.disk = disk
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        command = [sys.executable, "-m", "braid.cli.main", "standalone", "--port", "0", "--http-port", "0"]
        self.process = subprocess.Popen(
            [*command, "--data-dir", str(disk / "data")], stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("ready "), line
        self.url, self.http_url = line.split()[1:3]
        self.answers: dict[str, Counter[str]] = {"sdk": Counter(), "official": Counter(), "admin": Counter()}
        """What each client was told, and how often."""
        self.writable, self.changes = 1.0, 0
        self.gauges: dict[str, float] = {}

    def call(self, path: str, method: str = "GET") -> str:
        try:
            with urllib.request.urlopen(urllib.request.Request(self.http_url + path, method=method), timeout=10) as answer:
                return str(answer.read(), "utf-8")
        except (urllib.error.URLError, TimeoutError) as error:
            self.answers["admin"][f"{method} refused"] += 1
            return str(error)

    def look(self) -> None:
        """Note what the metrics say of the storage."""
        for line in self.call("/metrics").splitlines():
            if line.startswith("braid_storage_"):
                name, value = line.split()
                self.gauges[name.partition("{")[0]] = float(value)
        now = self.gauges.get("braid_storage_writable", self.writable)
        self.changes += now != self.writable
        self.writable = now

    def rss_mb(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024

    def log_lines(self) -> list[str]:
        self._log.flush()
        return Path(f"/proc/self/fd/{self._log.fileno()}").read_text().splitlines()

    def line(self, passed: float) -> str:
        free = self.gauges.get("braid_storage_free_bytes", 0.0) / (1 << 20)
        said = "; ".join(
            f"{who}: " + ", ".join(f"{name} {count}" for name, count in sorted(answers.items()))
            for who, answers in self.answers.items()
            if answers
        )
        lines = len(self.log_lines())
        return (
            f"{passed:5.0f} s  {self.rss_mb():7.1f} MB  free {free:6.1f} MB  {lines:6} lines  {self.changes:3} changes  {said}"
        )

    def turn(self, number: int) -> None:
        """Free or take some space from outside; now and then delete a topic."""
        ballast = self.disk / "ballast"
        if number % 3 == 2:
            self.delete((*SDK_TOPICS, OFFICIAL_TOPIC)[number // 3 % 3])
        if ballast.exists():
            ballast.unlink()
            return
        try:
            ballast.write_bytes(BALLAST)
        except OSError:
            ballast.unlink(missing_ok=True)

    def delete(self, topic: str) -> None:
        domain, _, rest = topic.partition("://")
        where = "persistent" if domain == "persistent" else "scalable"
        self.call(f"/admin/v2/{where}/{rest}?force=true", "DELETE")

    def make_room(self) -> None:
        (self.disk / "ballast").unlink(missing_ok=True)
        for topic in (*SDK_TOPICS, OFFICIAL_TOPIC):
            self.delete(topic)


async def produce(watched: Watched, topic: str) -> None:
    """Some messages at a time, without end; with a new producer when its topic was deleted or it could not be attached."""
    answers = watched.answers["sdk"]
    while True:
        try:
            async with braid.connect(watched.url) as client, client.producer(topic) as producer:
                while True:
                    results = await asyncio.gather(*[producer.send(MESSAGE) for _ in range(AT_ONCE)], return_exceptions=True)
                    for result in results:
                        answers[type(result).__name__ if isinstance(result, Exception) else "stored"] += 1
                    if gone := [result for result in results if isinstance(result, TopicNotFound)]:
                        raise gone[0]
                    await asyncio.sleep(PAUSE)
        except BraidError as error:
            answers[f"{type(error).__name__} when attaching"] += 1
            await asyncio.sleep(PAUSE)


def produce_officially(watched: Watched, done: threading.Event) -> None:
    """The same with the official client. Its producer lives on after refused messages; one whose topic was deleted comes back
    in ever longer intervals as long as there is no room for a new one, so it is made anew when its messages time out."""
    answers = watched.answers["official"]
    client = pulsar.Client(watched.url, logger=pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull))

    def answered(left: threading.Semaphore, result: Any, _message_id: Any) -> None:
        answers["stored" if result == pulsar.Result.Ok else str(result).rpartition(".")[2]] += 1
        left.release()

    def timeouts() -> int:
        return answers["Timeout"]

    while not done.is_set():
        try:
            producer = client.create_producer(OFFICIAL_TOPIC, send_timeout_millis=10_000, batching_enabled=False)
        except pulsar.PulsarException as error:
            answers[f"{type(error).__name__} when attaching"] += 1
            done.wait(PAUSE)
            continue
        while not done.is_set():
            left, before = threading.Semaphore(0), timeouts()
            try:
                for _ in range(AT_ONCE):
                    producer.send_async(MESSAGE, partial(answered, left))
            except pulsar.PulsarException as error:
                answers[f"{type(error).__name__} when sending"] += 1
                break
            for _ in range(AT_ONCE):
                left.acquire(timeout=30)
            if timeouts() > before:
                producer.close()
                break
            done.wait(PAUSE)
    client.close()


async def resumed(watched: Watched) -> dict[str, float]:
    """How long the producers that tried all the time need to store again, after there is room; absent if they do not."""
    began, seconds = time.monotonic(), dict[str, float]()
    before = {who: watched.answers[who]["stored"] for who in CLIENTS}
    while (passed := time.monotonic() - began) < RECOVERY_SECONDS and len(seconds) < len(CLIENTS):
        for who in CLIENTS:
            if watched.answers[who]["stored"] > before[who]:
                seconds.setdefault(who, passed)
        await asyncio.sleep(PAUSE / 4)
    return seconds


async def recovery(watched: Watched) -> dict[str, float]:
    """How long new clients need, after there is room, to store a message and to read it; absent if they do not."""
    began, seconds = time.monotonic(), dict[str, float]()

    async def sdk() -> None:
        async with braid.connect(watched.url) as client:
            consumer = await client.queue_consumer(SDK_TOPICS[0], "after", initial="earliest")
            async with client.producer(SDK_TOPICS[0]) as producer:
                await producer.send(b"after")
            while (await consumer.receive()).payload != b"after":
                pass
            await consumer.close()

    def official() -> None:
        client = pulsar.Client(watched.url, logger=pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull))
        try:
            consumer = client.subscribe(OFFICIAL_TOPIC, "after", initial_position=pulsar.InitialPosition.Earliest)
            client.create_producer(OFFICIAL_TOPIC).send(b"after")
            while consumer.receive(10_000).data() != b"after":
                pass
        finally:
            client.close()

    async def officially() -> None:
        await asyncio.to_thread(official)

    for name, attempt in (("sdk", sdk), ("official", officially)):
        while time.monotonic() - began < RECOVERY_SECONDS and name not in seconds:
            try:
                await attempt()
                seconds[name] = time.monotonic() - began
            except (BraidError, pulsar.PulsarException) as error:
                print(f"{name} after {time.monotonic() - began:.1f} s of room: {type(error).__name__}: {error}", flush=True)
                await asyncio.sleep(PAUSE)
    return seconds


async def run(options: argparse.Namespace, disk: Path) -> int:
    (disk / "ballast").write_bytes(BALLAST)
    watched = Watched(disk)
    tasks = [asyncio.create_task(produce(watched, topic)) for topic in SDK_TOPICS]
    done = threading.Event()
    thread = threading.Thread(target=produce_officially, args=(watched, done), daemon=True)
    thread.start()
    began, turns, samples, highest = time.monotonic(), 0, 0, 0.0
    again: dict[str, float] = {}
    recovered: dict[str, float] = {}
    try:
        while (passed := time.monotonic() - began) < options.seconds and watched.process.poll() is None:
            await asyncio.to_thread(watched.look)
            highest = max(highest, watched.rss_mb())
            if passed >= (turns + 1) * options.turn:
                await asyncio.to_thread(watched.turn, turns)
                turns += 1
            if passed >= samples * options.sample:
                samples += 1
                print(watched.line(passed), flush=True)
            await asyncio.sleep(0.25)
        if watched.process.poll() is None:
            await asyncio.to_thread(watched.make_room)
            again = await resumed(watched)
            await _end(tasks, done, thread)
            await asyncio.to_thread(watched.make_room)
            recovered = await recovery(watched)
            await asyncio.to_thread(watched.look)
            highest = max(highest, watched.rss_mb())
            print(watched.line(time.monotonic() - began), flush=True)
    finally:
        await _end(tasks, done, thread)
        is_alive = watched.process.poll() is None
        if is_alive:
            watched.process.send_signal(signal.SIGKILL)
        watched.process.wait(30)
    print(f"producers stored again after {_rounded(again)} s of room, new clients after {_rounded(recovered)} s")
    both = {who: recovered[who] for who in recovered if who in again}
    return _report(watched, options, is_alive=is_alive, highest=highest, turns=turns, recovered=both)


def _rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {who: round(value, 1) for who, value in seconds.items()}


async def _end(tasks: list[asyncio.Task[None]], done: threading.Event, thread: threading.Thread) -> None:
    done.set()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.to_thread(thread.join, 60)


def _report(
    watched: Watched, options: argparse.Namespace, *, is_alive: bool, highest: float, turns: int, recovered: dict[str, float]
) -> int:
    lines = watched.log_lines()
    kinds = Counter(" ".join(line.split()[2:9]) for line in lines)
    for kind, count in kinds.most_common(8):
        print(f"{count:7}  {kind}")
    allowed = watched.changes + 2 * turns + options.seconds / 60 + 10
    print(f"highest {highest:.0f} MB, {len(lines)} lines ({allowed:.0f} allowed), {turns} turns, {watched.changes} changes")
    print(f"gauges at the end: {watched.gauges}")
    wrong = [] if is_alive else ["the broker ended"]
    wrong += [f"{highest:.0f} MB of memory"] if highest > options.rss else []
    wrong += [f"{len(lines)} lines"] if len(lines) > allowed else []
    for who in CLIENTS:
        answers = watched.answers[who]
        wrong += [] if answers["stored"] else [f"{who} stored nothing"]
        wrong += [] if answers.keys() - {"stored"} else [f"{who} was never refused"]
        wrong += [] if who in recovered else [f"{who} did not recover"]
    print("FAILED: " + ", ".join(wrong) if wrong else "ok")
    return int(bool(wrong))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--megabytes", type=int, default=110, help="size of the file system")
    parser.add_argument("--turn", type=float, default=10, help="seconds between two changes of the free space")
    parser.add_argument("--sample", type=float, default=10, help="seconds between two lines")
    parser.add_argument("--rss", type=float, default=350, help="most resident memory of the broker, in MB")
    parser.add_argument("--private", action="store_true", help="mounts are private already")
    options = parser.parse_args()
    if not options.private:
        as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        command = ["unshare", "--mount", *as_root, sys.executable, "-m", "tests.e2e.full_disk_loop", "--private"]
        return subprocess.run([*command, *sys.argv[1:]], check=False).returncode
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={options.megabytes}m", "tmpfs", folder], check=True)
        try:
            return asyncio.run(run(options, Path(folder)))
        finally:
            subprocess.run(["umount", folder], check=False)  # it goes with the namespace in any case


if __name__ == "__main__":
    sys.exit(main())
