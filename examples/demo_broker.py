"""The broker process of the demonstration."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path


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
