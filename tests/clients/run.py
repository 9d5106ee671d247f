"""Official Pulsar clients of other languages against `braid standalone`: builds and runs the programs beside this file.

A program gets the service URL and a prefix for its topics. It writes one line per finding to its standard output,
`pass CHECK`, `skip CHECK WHY` (its client has no such thing) or `fail CHECK WHY`, and asks for what it cannot do itself with
`do REQUEST ...`; the answer `done ...` or `failed ...` comes on its standard input. Requests: `partitions TOPIC COUNT`,
`terminate TOPIC`, `consumer TOPIC` (which connection serves the topic's one consumer) and `restart` (kill -9, then start on
the same ports and data); for scalable topics `scalable TOPIC SEGMENTS` (create it, keys routed by the low half of their hash,
as the V5 client does), `layout TOPIC` (answers `ID:START-END` of each active segment), `split TOPIC ID`, `merge TOPIC ID ID`.

Exit code 0: every program passed all its checks, and the broker logged no error.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
WORK = HERE.parent.parent / ".work" / "clients"
PROGRAM_SECONDS = 240
BUILD_SECONDS = 900
RECORD = HERE / "passed.json"
"""The checks that each client passed when all of them were last run without a failure; the table of requirements reads it."""
SETTINGS = {"BRAID__BROKER__RETENTION_MINUTES": "-1", "BRAID__BROKER__RETENTION_MB": "-1"}
"""What was acknowledged stays readable, so that a program can read a topic again from its beginning."""


@dataclass(frozen=True)
class Client:
    """How one program is built and run."""

    name: str
    tools: tuple[str, ...]
    manifest: str
    version: str
    """Pattern that finds the client's version in the manifest."""
    build: tuple[str, ...]
    run: tuple[str, ...]


CLIENTS = [
    Client(
        name="go",
        tools=("go",),
        manifest="go.mod",
        version=r"pulsar-client-go v([\d.]+)",
        build=("go", "build", "-o", f"{WORK}/go/client", "."),
        run=(f"{WORK}/go/client",),
    ),
    Client(
        name="rust",
        tools=("cargo",),
        manifest="Cargo.toml",
        version=r'pulsar = \{ version = "=([\d.]+)"',
        build=("cargo", "build", "--quiet", "--target-dir", f"{WORK}/rust"),
        run=(f"{WORK}/rust/debug/client",),
    ),
    Client(
        name="java",
        tools=("java", "mvn"),
        manifest="pom.xml",
        version=r"<pulsar.version>([\d.]+)<",
        build=("mvn", "--quiet", "--batch-mode", "compile", f"-Dwork={WORK}/java"),
        run=("java", "-Xmx512m", "-cp", f"{WORK}/java/classes:{WORK}/java/lib/*", "braid.clients.Main"),
    ),
    Client(
        name="java-v5",
        tools=("java", "mvn"),
        manifest="pom.xml",
        version=r"<pulsar.version>([\w.-]+)<",
        build=("mvn", "--quiet", "--batch-mode", "compile", f"-Dwork={WORK}/java-v5"),
        run=("java", "-Xmx512m", "-cp", f"{WORK}/java-v5/classes:{WORK}/java-v5/lib/*", "braid.clients.v5.Main"),
    ),
]


@dataclass
class Report:
    """What one program found."""

    client: str
    version: str = ""
    passed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def row(self) -> str:
        counts = f"{len(self.passed):>6} {len(self.failed):>6} {len(self.skipped):>12}"
        return f"{self.client:<8} {self.version:<8} {counts} {self.seconds:>8.1f}"


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("localhost", 0))
        return int(sock.getsockname()[1])


class Broker:
    """A `braid standalone` process that can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "broker.log"
        self._data = folder / "data"
        self._port, self._http_port = free_port(), free_port()
        self.url = f"pulsar://localhost:{self._port}"
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        command = [str(Path(sys.executable).parent / "braid"), "standalone", "--data-dir", str(self._data)]
        command += ["--port", str(self._port), "--http-port", str(self._http_port), "--log-level", "warning"]
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, **SETTINGS}
            )
        assert self._process.stdout is not None
        if not self._process.stdout.readline().startswith("ready "):
            raise RuntimeError(f"the broker did not start:\n{self.log.read_text()}")

    def restart(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        self.start()

    def stop(self) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait(60)

    def errors(self) -> list[str]:
        lines = self.log.read_text().splitlines()
        return [line for line in lines if "Traceback" in line or " ERROR " in line or " CRITICAL " in line]

    def admin(self, method: str, topic: str, action: str, body: str = "") -> str:
        """One REST call about a topic."""
        url = f"http://localhost:{self._http_port}/admin/v2/{topic.replace('://', '/')}{action}"
        request = urllib.request.Request(url, body.encode(), {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=40) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            raise ValueError(f"{error.code} {error.read().decode()}") from error

    def scalable(self, method: str, topic: str, action: str = "") -> str:
        """One REST call about a scalable topic."""
        return self.admin(method, topic.replace("topic://", "scalable/"), action)

    def layout(self, topic: str) -> str:
        segments = json.loads(self.scalable("GET", topic))["segments"].values()
        active = sorted((each["hashRange"]["start"], each) for each in segments if each["state"] == "ACTIVE")
        return " ".join(f"{each['segmentId']}:{start:x}-{each['hashRange']['end']:x}" for start, each in active)

    def serve(self, request: list[str]) -> str:
        """Do what a program asked for; returns the answer's text."""
        match request:
            case ["partitions", topic, count]:
                self.admin("PUT", topic, "/partitions", count)
            case ["terminate", topic]:
                self.admin("POST", topic, "/terminate")
            case ["consumer", topic]:
                stats = json.loads(self.admin("GET", topic, "/stats"))
                consumers = [each for subscription in stats["subscriptions"].values() for each in subscription["consumers"]]
                if len(consumers) != 1:
                    raise ValueError(f"the topic has {len(consumers)} consumers, not one")
                return f"{consumers[0]['address']} since {consumers[0]['connectedSince']}"
            case ["scalable", topic, segments]:
                self.scalable("PUT", topic, f"?numInitialSegments={segments}&routing=low16")
            case ["layout", topic]:
                return self.layout(topic)
            case ["split", topic, segment]:
                self.scalable("POST", topic, f"/split/{segment}")
            case ["merge", topic, one, other]:
                self.scalable("POST", topic, f"/merge/{one}/{other}")
            case ["restart"]:
                self.restart()
            case _:
                raise ValueError(f"no such request: {request}")
        return ""


def build(client: Client) -> str | None:
    """Build the program; returns why that did not work."""
    environment = dict(os.environ)
    if client.name == "rust" and "PROTOC" not in environment and shutil.which("protoc") is None:
        # The crate generates its protocol classes; the development requirements bring a compiler for that.
        wrapper = WORK / "protoc"
        wrapper.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m grpc_tools.protoc "$@"\n')
        wrapper.chmod(0o755)
        environment["PROTOC"] = str(wrapper)
    done = subprocess.run(
        client.build,
        cwd=HERE / client.name,
        env=environment,
        capture_output=True,
        text=True,
        timeout=BUILD_SECONDS,
        check=False,
    )
    return None if done.returncode == 0 else (done.stdout + done.stderr)[-4000:]


def run(client: Client, broker: Broker, prefix: str, checks: str, report: Report) -> None:
    """Run the program and answer its requests until it ends."""
    with (WORK / f"{client.name}.log").open("w") as log:
        command = [*client.run, broker.url, prefix, *([checks] if checks else [])]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
    overdue = threading.Event()

    def expire() -> None:
        overdue.set()
        process.kill()

    timer = threading.Timer(PROGRAM_SECONDS, expire)
    timer.start()
    assert process.stdin is not None
    assert process.stdout is not None
    for line in process.stdout:
        word, _, rest = line.rstrip("\n").partition(" ")
        if word == "do":
            try:
                answer = f"done {broker.serve(rest.split())}"
            except (OSError, ValueError) as error:
                answer = f"failed {error}"
            process.stdin.write(answer.strip() + "\n")
            process.stdin.flush()
        elif word in ("pass", "skip", "fail"):
            say(f"  {client.name} {word} {rest}")
            {"pass": report.passed, "skip": report.skipped, "fail": report.failed}[word].append(rest)
    code = process.wait()
    timer.cancel()
    if overdue.is_set():
        report.failed.append(f"did not end within {PROGRAM_SECONDS} seconds")
    elif code != 0 and not report.failed:
        report.failed.append(f"ended with exit code {code}; see {WORK / client.name}.log")
    elif not report.passed and not report.failed:
        report.failed.append("reported nothing")


def try_client(client: Client, broker: Broker, checks: str) -> Report:
    manifest = (HERE / client.name / client.manifest).read_text()
    found = re.search(client.version, manifest)
    report = Report(client.name, found[1] if found else "?")
    missing = [tool for tool in client.tools if shutil.which(tool) is None]
    if missing:
        report.failed.append(f"missing: {', '.join(missing)} is not installed")
        return report
    say(f"building {client.name} {report.version}")
    problem = build(client)
    if problem is not None:
        report.failed.append("does not build")
        say(problem)
        return report
    before = len(broker.errors())
    began = time.perf_counter()
    run(client, broker, f"persistent://public/default/{client.name}", checks, report)
    report.seconds = time.perf_counter() - began
    report.failed += [f"broker log: {line}" for line in broker.errors()[before:]]
    return report


def record(reports: list[Report]) -> None:
    """Write down what passed; a client that failed anything has nothing to show."""
    known = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    for report in reports:
        known.pop(report.client, None)
        if report.passed and not report.failed:
            checks = sorted({check.partition(" ")[0] for check in report.passed})
            known[report.client] = {"version": report.version, "checks": checks}
    RECORD.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")


def main() -> int:
    names = [client.name for client in CLIENTS]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("clients", nargs="*", choices=[*names, []], help="which clients; all if none is named")
    parser.add_argument("--checks", default="", help="run only checks whose name begins with this")
    options = parser.parse_args()
    chosen = [client for client in CLIENTS if not options.clients or client.name in options.clients]
    WORK.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="braid-clients-") as folder:
        broker = Broker(Path(folder))
        broker.start()
        try:
            reports = [try_client(client, broker, options.checks) for client in chosen]
        finally:
            broker.stop()
            shutil.copy(broker.log, WORK / "broker.log")
    say(f"\n{'client':<8} {'version':<8} {'passed':>6} {'failed':>6} {'not offered':>12} {'seconds':>8}")
    for report in reports:
        say(report.row)
        for failure in report.failed:
            say(f"         failed: {failure}")
    if not options.checks:
        record(reports)
    return 1 if any(report.failed for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
