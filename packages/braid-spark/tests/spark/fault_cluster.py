"""The processes of a fault run: a broker behind a proxy that can lose its answers, a Spark cluster of two workers on two
addresses, and the query's driver. All of them real, all on loopback.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from quick_start import BARE_OPTIONS, JAVA_OPTIONS

HERE = Path(__file__).resolve().parent
T = TypeVar("T")
BROKER_HOST = "127.0.0.1"
PROXY_HOST = "127.0.0.5"
WORKER_HOSTS = ("127.0.0.1", "127.0.0.2")
"""Spark copies a slow attempt only to another host."""
START_SECONDS = 60.0
BROKER_SETTINGS = {
    "BRAID__BROKER__RETENTION_MINUTES": "-1",
    "BRAID__BROKER__RETENTION_MB": "-1",
    "BRAID__TRANSACTIONS__COLLECT_SECONDS": "1",
    "BRAID__TRANSACTIONS__RETENTION_SECONDS": "20",
    "BRAID__STORAGE__SESSION_TIMEOUT_SECONDS": "3",
    "BRAID__LOG__LEVEL": "warning",
}


def free_port(*hosts: str) -> int:
    """A port that is free at all of these addresses."""
    while True:
        with socket.socket() as probe:
            probe.bind((hosts[0], 0))
            port = int(probe.getsockname()[1])
            try:
                for host in hosts[1:]:
                    with socket.socket() as other:
                        other.bind((host, port))
            except OSError:
                continue
            return port


def note(folder: Path, process: subprocess.Popen[Any]) -> None:
    """Write down what was started: if the run itself is killed, this is what is left to be ended, by id."""
    with (folder / "pids").open("a") as file:
        file.write(f"{process.pid} {' '.join(map(str, process.args))[:200]}\n")  # type: ignore[arg-type]


def kill_child(pid: int, parents: list[int]) -> bool:
    """SIGKILL to a process that one of ours has started; False if there is no such process any more. A number that was reported
    a while ago may belong to somebody else by now."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        if pid > 1 and int(status.partition("\nPPid:")[2].split()[0]) in parents:
            os.kill(pid, signal.SIGKILL)
            return True
    except OSError:
        pass
    return False


def kill_group(process: subprocess.Popen[Any]) -> None:
    """End a process and whatever it started, at once."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


class Proxy:
    """Passes everything on between clients and the broker, until it is told to lose the broker's answers."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writers: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[Any]] = set()
        self._is_losing = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._do(self._listen())

    def lose_answers(self, seconds: float) -> None:
        """From now on nothing comes back from the broker, which still gets what is sent; after so long, connections break."""
        self._do(self._lose())
        self._loop.call_soon_threadsafe(self._loop.call_later, seconds, self._break)

    def close(self) -> None:
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, PROXY_HOST, self._port)

    async def _end(self) -> None:
        self._server.close()
        self._break()
        if self._serving:
            await asyncio.wait(self._serving, timeout=5)

    async def _lose(self) -> None:
        self._is_losing = True

    def _break(self) -> None:
        self._is_losing = False
        for each in list(self._writers):
            each.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        try:
            there, back = await asyncio.open_connection(BROKER_HOST, self._port)
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, back}
        self._writers |= ends
        await asyncio.gather(self._copy(reader, back, is_answer=False), self._copy(there, writer, is_answer=True))
        self._writers -= ends

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, is_answer: bool) -> None:
        try:
            while data := await source.read(1 << 16):
                if not (is_answer and self._is_losing):
                    target.write(data)
                    await target.drain()
        except OSError:
            pass
        target.transport.abort()


class Broker:
    """`braid standalone`, which is killed and started again over the same data."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port(BROKER_HOST, PROXY_HOST)
        self.http_port = free_port(BROKER_HOST)
        self._log = (folder / "broker.log").open("ab")
        self._process: subprocess.Popen[Any] | None = None
        self.kills = 0
        self.start()
        self.proxy = Proxy(self.port)

    @property
    def url(self) -> str:
        """Through the proxy."""
        return f"pulsar://{PROXY_HOST}:{self.port}"

    @property
    def http_url(self) -> str:
        return f"http://{BROKER_HOST}:{self.http_port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "braid.cli.main", "standalone", "--data-dir", str(self.folder / "data")]
        command += ["--host", BROKER_HOST, "--advertised-address", PROXY_HOST]
        command += ["--port", str(self.port), "--http-port", str(self.http_port)]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._log, env=os.environ | BROKER_SETTINGS, start_new_session=True
        )
        note(self.folder, self._process)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith(b"ready"):
            raise RuntimeError(f"the broker did not start, see {self.folder / 'broker.log'}")

    def kill(self) -> None:
        assert self._process is not None
        kill_group(self._process)
        self._close_pipe()
        self.kills += 1

    def restart(self) -> None:
        self.kill()
        self.start()

    def stop(self) -> None:
        """End it in an orderly way."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                kill_group(self._process)
            self._close_pipe()

    def close(self) -> None:
        self.stop()
        self.proxy.close()
        self._log.close()

    def _close_pipe(self) -> None:
        if self._process is not None and self._process.stdout is not None:
            self._process.stdout.close()


class SparkCluster:
    """A master and two workers of the installed package, on two addresses."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        import pyspark

        # As the driver has it: the archive of classes is for one way to write where they are.
        self._class = Path(pyspark.__file__).resolve().parent / "bin" / "spark-class"
        self._folder = folder
        self._environment = {
            **os.environ,
            **environment,
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_NO_DAEMONIZE": "1",
            "SPARK_WORKER_DIR": str(folder / "work"),
            "SPARK_LOCAL_DIRS": str(folder / "local"),
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": JAVA_OPTIONS,
            "SPARK_LAUNCHER_OPTS": BARE_OPTIONS,
            # Executors are killed as often as the run likes.
            "SPARK_MASTER_OPTS": "-Dspark.deploy.maxExecutorRetries=-1",
        }
        self.processes: list[subprocess.Popen[Any]] = []
        port = free_port(WORKER_HOSTS[0])
        self.url = f"spark://{WORKER_HOSTS[0]}:{port}"
        self._start(
            "master", WORKER_HOSTS[0], "org.apache.spark.deploy.master.Master", "--port", str(port), "--webui-port", "0"
        )
        self._wait_for("master.log", "New state: ALIVE", 1)
        for number, host in enumerate(WORKER_HOSTS):
            self._start(
                f"worker-{number}", host, "org.apache.spark.deploy.worker.Worker",
                "--cores", "2", "--memory", "1g", "--webui-port", "0", self.url,
            )  # fmt: skip
        self._wait_for("master.log", "Registering worker", len(WORKER_HOSTS))

    def kill_executor(self, jvm: int) -> bool:
        """SIGKILL to an executor; False: it is gone."""
        return kill_child(jvm, [each.pid for each in self.processes])

    def close(self) -> None:
        for process in reversed(self.processes):
            kill_group(process)

    def _start(self, name: str, host: str, *command: str) -> None:
        with (self._folder / f"{name}.log").open("wb") as log:
            self.processes.append(
                subprocess.Popen(
                    [str(self._class), command[0], "--host", host, *command[1:]],
                    stdout=log,
                    stderr=log,
                    env={**self._environment, "SPARK_LOCAL_IP": host},
                    start_new_session=True,
                )
            )
        note(self._folder, self.processes[-1])

    def _wait_for(self, name: str, text: str, count: int) -> None:
        deadline = time.monotonic() + START_SECONDS
        while (self._folder / name).read_text().count(text) < count:
            if time.monotonic() > deadline or any(each.poll() is not None for each in self.processes):
                raise RuntimeError(f"Spark's cluster did not start, see {self._folder / name}")
            time.sleep(0.1)


class Driver:
    """The query's driver process with its JVM; started again when it has died."""

    def __init__(
        self, folder: Path, environment: dict[str, str], arguments: list[str], script: str = "fault_driver.py"
    ) -> None:
        self._folder = folder
        self._script = HERE / script
        self._environment = {
            **os.environ,
            **environment,
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_LAUNCHER_OPTS": BARE_OPTIONS,
        }
        self._arguments = arguments
        self.starts = 0
        self.jvm = 0
        """Process id of its JVM, once it is up."""
        self._process: subprocess.Popen[Any] | None = None

    @property
    def log(self) -> Path:
        return self._folder / f"driver-{self.starts:03}.log"

    def start(self) -> None:
        self.starts += 1
        self.jvm = 0
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(self._script), *self._arguments],
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )
        note(self._folder, self._process)

    def poll(self) -> int | None:
        """The exit code, if it has ended."""
        return self._process.poll() if self._process is not None else None

    def kill_jvm(self) -> bool:
        """SIGKILL to the JVM alone; the rest of the driver falls with it. False: there is none."""
        return self._process is not None and kill_child(self.jvm, [self._process.pid])

    def reap(self) -> None:
        """Nothing of it is left."""
        if self._process is not None:
            kill_group(self._process)


def clean(folder: Path) -> None:
    """What Spark's workers left: copies of logs and jars."""
    for name in ("work", "local", "scratch"):
        shutil.rmtree(folder / name, ignore_errors=True)
