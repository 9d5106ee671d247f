"""What every scenario is given: the generator, the size of the run, and where figures go."""

from __future__ import annotations

import subprocess
import sys
from types import TracebackType

import msgspec
from bench.broker_process import ROOT, WORK
from bench.jobs import Job, Result
from bench.report import Figure, show


class Run:
    """One run of the benchmark; owns the generator's process."""

    def __init__(self, *, is_quick: bool, is_unbatched: bool) -> None:
        self.is_quick = is_quick
        self.is_unbatched = is_unbatched
        """Memory is measured with unbatched messages."""
        self.figures: list[Figure] = []
        self.failures: list[str] = []
        WORK.mkdir(parents=True, exist_ok=True)
        with (WORK / "load.log").open("ab") as errors:
            self._generator = subprocess.Popen(
                [sys.executable, "-m", "bench.load"],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._generator.terminate()
        self._generator.wait()

    def load(self, job: Job) -> Result:
        """Let the generator do a job; raises RuntimeError if it could not."""
        stdin, stdout = self._generator.stdin, self._generator.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("The load generator is not running.")
        stdin.write(msgspec.json.encode(job).decode() + "\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise RuntimeError(f"The load generator ended; see {WORK / 'load.log'}.")
        result = msgspec.json.decode(line, type=Result)
        if result.error:
            raise RuntimeError(f"{job.mode} of {job.shape.name}: {result.error}")
        return result

    def add(self, figures: list[Figure]) -> None:
        """Keep figures and show them."""
        show(figures, self.figures[-1].group if self.figures else "")
        self.figures += figures

    def progress(self, text: str) -> None:
        """Say what is going on, to whoever watches."""
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{text}\r")
            sys.stderr.flush()
