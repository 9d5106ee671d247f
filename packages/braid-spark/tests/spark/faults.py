"""Faults at the Spark sink: a real query on a real cluster is hit again and again, and its output must be right.

The query computes a function of each input number. At named points of the sink, which `fault_points` stops at, this run kills
the driver's JVM, an executor or the broker with SIGKILL, loses the broker's answers, or lets an attempt be overtaken by its
copy on the other worker. After the last one the output is read by the official Pulsar client and compared with the function of
the input as a multiset; no transaction may be open and no record of an operation left.

`--semantics at-least-once` is the control: the same faults with an ordinary sink must show duplicates. Exit code 0: as
promised.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socketserver
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from fault_checks import count_ops, open_transactions, read_all
from fault_cluster import HERE, Broker, Driver, SparkCluster, clean, free_port
from fork_server import ForkServer

PHASES = ("partial publish", "before decide", "after decide", "speculation")
SHARES: dict[str, dict[str, int]] = {
    "partial publish": {"driver": 10, "executor": 15, "broker": 12, "answers": 13},
    "before decide": {"driver": 16, "executor": 8, "broker": 12, "answers": 14},
    "after decide": {"driver": 20, "executor": 8, "broker": 8, "commit": 14},
    "speculation": {"overtaken": 14, "late": 14, "driver": 6, "executor": 8, "broker": 8},
}
"""How many of 200 hit what. `answers`: those of the broker are lost and its connections break; `commit`: Spark is told that a
commit failed which did not; `overtaken` and `late`: the slow attempt goes on before, or after, the decision."""
SHORT = [
    ("partial publish", "executor"),
    ("before decide", "answers"),
    ("speculation", "late"),
    ("partial publish", "broker"),
    ("after decide", "driver"),
]
"""One of each, for those who cannot wait."""
ROWS = 100
"""Of one batch, in two partitions."""
MISSED = "there was nothing to kill"
STUCK_SECONDS = 300.0
OVERTAKE_SECONDS = 30.0
INPUT = "topic://public/default/numbers"
OUTPUT = "persistent://public/default/results"


def result_of(number: int) -> str:
    """What the query must make of a number."""
    return f"{number}:{number * 7 + 3}"


@dataclass
class Injection:
    """One fault."""

    number: int
    phase: str
    target: str
    batch: int = -1
    partition: int = -1
    note: str = ""


@dataclass
class Held:
    """An attempt that waits to be overtaken."""

    injection: Injection
    said: dict[str, Any]
    release: threading.Event = field(default_factory=threading.Event)
    finished: threading.Event = field(default_factory=threading.Event)
    is_overtaken: bool = False


def plan(count: int, random: Random) -> list[Injection]:
    """So many faults in the shares above, in a random order that depends on the seed alone."""
    every = [(phase, target) for phase, targets in SHARES.items() for target, share in targets.items() for _ in range(share)]
    chosen: list[tuple[str, str]] = []
    while len(chosen) < count:
        chosen += random.sample(every, len(every))
    return [Injection(number, phase, target) for number, (phase, target) in enumerate(chosen[:count], 1)]


class Run:
    """One run: what is armed, what happened, and what was fed."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments = arguments
        self.folder = folder
        self.random = Random(arguments.seed)
        self.todo = plan(arguments.count, self.random)
        if arguments.short:
            self.todo = [Injection(number, phase, target) for number, (phase, target) in enumerate(SHORT, 1)]
        self.done: list[Injection] = []
        self.lock = threading.Lock()
        self.armed: Injection | None = None
        self.under_way: Injection | None = None
        self.held: Held | None = None
        self.awaiting = False
        """The query has to show that it goes on after the last fault."""
        self.decided = 0
        self.replays = 0
        self.rows_fed = 0
        self.failed_starts = 0
        self.latest = time.monotonic()
        self.executors: set[int] = set()
        self.log = (folder / "faults.jsonl").open("w")
        port = free_port("127.0.0.1")
        self.server = socketserver.ThreadingTCPServer(("127.0.0.1", port), self._handler(), bind_and_activate=True)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.fork_server = ForkServer()
        environment = {
            **self.fork_server.environment,
            "BRAID_FAULTS": f"127.0.0.1:{port}",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])),
        }
        self.broker = Broker(folder)
        self.cluster = SparkCluster(folder, environment)
        self.stop_file = folder / "stop"
        self.driver = Driver(
            folder,
            environment,
            [
                *("--master", self.cluster.url, "--url", self.broker.url, "--source", arguments.source),
                *("--input", INPUT if arguments.source == "braid" else str(folder / "input")),
                *("--output", OUTPUT, "--checkpoint", str(folder / "checkpoint"), "--scratch", str(folder / "scratch")),
                *("--stop", str(self.stop_file), "--semantics", arguments.semantics, "--rows", str(ROWS)),
                *("--publish", arguments.publish),
            ],
        )
        self.feeder = Feeder(self)

    def _handler(self) -> type[socketserver.StreamRequestHandler]:
        run = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                try:
                    answer = run.reached(json.loads(self.rfile.readline()))
                    self.wfile.write(answer.encode() + b"\n")
                except (OSError, ValueError):
                    pass  # whoever asked was killed

        return Handler

    # What the query says.

    def reached(self, said: dict[str, Any]) -> str:
        """A point is reached; returns how to go on."""
        point = said["point"]
        if point == "driver up":
            self.driver.jvm = said["driver"]
            return "go"
        with self.lock:
            self.latest = time.monotonic()
            if "attempt" in said:
                self.executors.add(said["jvm"])
            held, chosen = self.held, None
            if held is None and self.armed is not None:
                wanted = "partial publish" if self.armed.phase == "speculation" else self.armed.phase
                if wanted == point and (point != "after decide" or said["rows"]):
                    chosen, self.armed, self.under_way = self.armed, None, self.armed
                    chosen.batch, chosen.partition = said["batch"], said.get("partition", -1)
                    if chosen.phase == "speculation":
                        held = self.held = Held(chosen, said)
            if point == "after decide":
                self.decided += 1
                self.replays += not said["rows"]
                if chosen is None and self.under_way is None:
                    self.awaiting = False
        if chosen is not None and held is not None:
            return self.hold(held)
        if chosen is not None:
            return self.inject(chosen, said)
        if held is not None and said.get("batch") == held.injection.batch:
            return self.beside(held, said)
        return "go"

    def inject(self, injection: Injection, said: dict[str, Any]) -> str:
        answer = "go"
        match injection.target:
            case "driver":
                answer = self.kill_driver(injection)
            case "executor":
                self.kill_executor(said["jvm"] if "attempt" in said else None, injection)
            case "broker":
                self.kill_broker(injection)
            case "answers":
                self.broker.proxy.lose_answers(0.3)
            case "commit":
                answer = "raise"
        self.finish(injection)
        return answer

    # Speculation.

    def hold(self, held: Held) -> str:
        """Keep this attempt from going on until its copy is there."""
        if not held.release.wait(OVERTAKE_SECONDS):
            with self.lock:
                if self.held is held:  # it was the only one, or nobody had room for a copy: try again
                    self.held = self.under_way = None
                    self.todo.append(held.injection)
        return "go"

    def beside(self, held: Held, said: dict[str, Any]) -> str:
        """Something happens in a batch of which one attempt is held."""
        point, answer = said["point"], "go"
        if point == "written":
            if said["partition"] == held.said["partition"]:
                if said["attempt"] == held.said["attempt"]:
                    held.finished.set()
                else:
                    held.is_overtaken = True
            return "go"
        if point == "before decide" and held.is_overtaken:
            match held.injection.target:
                case "driver":
                    answer = self.kill_driver(held.injection)
                case "executor":
                    self.kill_executor(held.said["jvm"], held.injection)
                case "broker":
                    self.kill_broker(held.injection)
                case "overtaken":
                    held.release.set()
                    held.injection.note = "went on" if held.finished.wait(1.5) else "was ended by Spark"
                case "late":
                    return "go"  # let go after the decision
            self._let_go(held)
        elif point == "after decide":
            self._let_go(held)
        return answer

    def _let_go(self, held: Held) -> None:
        with self.lock:
            if self.held is not held:
                return
            self.held = None
        held.release.set()
        if held.is_overtaken:
            self.finish(held.injection)
        else:
            with self.lock:
                self.under_way = None
                self.todo.append(held.injection)

    # Deeds.

    def kill_driver(self, injection: Injection) -> str:
        """Its JVM. The Python process that has stopped here may die with it, or do its next step first, on its own."""
        if not self.driver.kill_jvm():
            injection.note = MISSED
            return "go"
        answer = self.random.choice(["die", "go"])
        injection.note = "with its process" if answer == "die" else "whose process goes on"
        return answer

    def kill_executor(self, jvm: int | None, injection: Injection) -> None:
        alive = sorted(self.executors)
        self.random.shuffle(alive)
        for victim in alive if jvm is None else [jvm]:
            self.executors.discard(victim)
            if self.cluster.kill_executor(victim):
                return
        injection.note = MISSED

    def kill_broker(self, injection: Injection) -> None:
        if self.random.random() < 0.5:
            self.broker.restart()
            injection.note = "back before the next step"
            return
        # While the next step is under way.
        delay = self.random.random() * 0.05
        injection.note = f"{delay * 1000:.0f} ms into the next step"
        threading.Timer(delay, self.broker.restart).start()

    def finish(self, injection: Injection) -> None:
        with self.lock:
            self.under_way = None
            if injection.note == MISSED:
                injection.note = ""
                self.todo.append(injection)
                return
            self.done.append(injection)
            self.awaiting = True
            self.log.write(json.dumps({**asdict(injection), "at": round(time.time(), 3), "driver": self.driver.starts}) + "\n")
            self.log.flush()
        say(f"{len(self.done):4} {injection.phase:16} {injection.target:10} batch {injection.batch:4} {injection.note}")

    # The whole.

    def run(self) -> None:
        """All faults, then to the end of the input."""
        self.driver.start()
        deadline = time.monotonic() + self.arguments.seconds
        while self.todo or self.armed or self.under_way or self.awaiting:
            if time.monotonic() > deadline:
                with self.lock:
                    self.todo, self.armed = [], None
            self.feeder.feed_up_to(self.decided + 2)
            with self.lock:
                if self.armed is None and self.under_way is None and not self.awaiting and self.todo:
                    self.armed = self.todo.pop(0)
            self._watch()
        self.stop_file.touch()
        say("no more faults; to the end of the input")
        while self.driver.poll() != 0:
            self._watch()

    def _watch(self) -> None:
        time.sleep(0.05)
        code = self.driver.poll()
        if code is not None and code != 0:
            self.driver.reap()
            self.failed_starts = 0 if self.driver.jvm else self.failed_starts + 1
            if self.failed_starts == 3:
                raise RuntimeError(f"the driver does not start, see {self.driver.log}")
            if code == 3 and "LostReply" not in (text := self.driver.log.read_text(errors="replace")):
                say(f"     the query failed: {text[text.find('QUERY FAILED') :][:1500]}")
            with self.lock:
                if (held := self.held) is not None:
                    self.held = self.under_way = None
                    held.release.set()
                    self.todo.append(held.injection)
            self.driver.start()
            self.latest = time.monotonic()
        if time.monotonic() - self.latest > STUCK_SECONDS:
            raise RuntimeError(f"nothing happened for {STUCK_SECONDS:g} s; see {self.driver.log}")

    def close(self) -> None:
        self.driver.reap()
        self.cluster.close()
        self.feeder.close()
        self.broker.close()
        self.fork_server.close()
        self.server.shutdown()
        self.log.close()
        clean(self.folder)


class Feeder:
    """Puts numbers into the input, one batch after the other."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._batches = 0
        self._client: Any = None
        if run.arguments.source == "files":
            (run.folder / "input").mkdir()
            return
        from braid.client import blocking

        with blocking.AdminClient(run.broker.http_url) as admin:
            admin.scalable_topics.create(INPUT, segments=2)
        self._client = blocking.connect(run.broker.url).__enter__()
        self._producer = self._client.producer(INPUT, name="numbers", deduplication=True)

    def feed_up_to(self, batches: int) -> None:
        while self._batches < batches:
            first = self._run.rows_fed
            self._run.rows_fed += ROWS
            if self._client is not None:
                sent = [self._producer.send_nowait(b"%d" % n, key=str(n)) for n in range(first, first + ROWS)]
                for each in sent:
                    each.result()
            else:
                for half, start in enumerate((first, first + ROWS // 2)):
                    text = "".join(f"{number}\n" for number in range(start, start + ROWS // 2))
                    hidden = self._run.folder / f"{self._batches}-{half}.txt"
                    hidden.write_text(text)
                    hidden.rename(self._run.folder / "input" / hidden.name)
            self._batches += 1

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def check(run: Run) -> bool:
    """Print what came out; True: as promised."""
    found = Counter(read_all(run.broker.url, OUTPUT, run.rows_fed))
    wanted = Counter(result_of(number) for number in range(run.rows_fed))
    duplicates = sum((found - wanted).values())
    missing = sum((wanted - found).values())
    still_open = open_transactions(run.broker.http_url)
    time.sleep(3)  # for the last collection
    run.broker.stop()
    ops = asyncio.run(count_ops(run.folder))
    table = Counter((each.phase, each.target) for each in run.done)
    targets = sorted({target for _phase, target in table})
    say("")
    say(f"{'':16}" + "".join(f"{each:>11}" for each in targets) + f"{'all':>11}")
    for phase in PHASES:
        row = [table[phase, target] for target in targets]
        say(f"{phase:16}" + "".join(f"{each or '':>11}" for each in row) + f"{sum(row):>11}")
    say(f"{'all':16}" + "".join(f"{sum(table[p, t] for p in PHASES):>11}" for t in targets) + f"{len(run.done):>11}")
    say(
        f"{run.rows_fed} numbers in {run.decided} commits ({run.replays} of them replays), {run.driver.starts} drivers: "
        f"{duplicates} duplicates, {missing} missing, {len(still_open)} open transactions, {ops} operation records"
    )
    if run.arguments.semantics == "at-least-once":
        return duplicates > 0 and not missing
    return not (duplicates or missing or still_open or ops)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=200, help="Faults.")
    parser.add_argument("--short", action="store_true", help="A handful of faults of every kind.")
    parser.add_argument("--seconds", type=float, default=1e9, help="No faults after this long; what was promised is checked.")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--semantics", choices=["exactly-once", "at-least-once"], default="exactly-once")
    parser.add_argument("--publish", choices=["streaming", "atEnd"], default="streaming")
    parser.add_argument("--source", choices=["braid", "files"], default="braid")
    parser.add_argument("--folder", type=Path, help="Where logs stay; without it they are removed.")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))  # nothing may be left running
    with tempfile.TemporaryDirectory(prefix="braid-faults-") as made:
        folder = arguments.folder or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        run = Run(arguments, folder)
        try:
            run.run()
            is_good = check(run)
        finally:
            run.close()
    say("as promised" if is_good else "NOT as promised")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
