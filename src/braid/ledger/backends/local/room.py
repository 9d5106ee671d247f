"""`Room`: the time from "the disk is nearly full" to "there is room again", and what is said about it.

Owns the probe, the distance between refusing and resuming, and the log lines: one at the beginning, one a minute, one at the
end, however many writes are refused in between. Must not know what is written: `commit` decides what is refused.

Resuming needs more free space than refusing: a store that took entries again as soon as one byte is above the reserve would
stop at the next group, once a second, for as long as the disk stays nearly full. The same holds for flushes and checkpoints,
which give back what they have written when they fail.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from braid.errors import LedgerStoreReadOnly
from braid.ledger.backends.local.journal import FULL, no_space
from braid.ledger.config import LocalSettings
from braid.runtime.clock import Clock, Timer
from braid.runtime.files import FileSystem
from braid.runtime.threads import Worker

log = logging.getLogger(__name__)

REMINDER_SECONDS = 60.0
_PROBE_FILE = "probe.tmp"
_PROBE_BYTES = 1 << 16
_PIECE_BYTES = 1 << 20


class Room:
    """See the module. `unmoved` tells the bytes for which a flush or checkpoint found no room. `still_full` is told the free
    bytes after each look, None if not even a look could be written; `ended` is called with None when there is room again, with
    an error if the disk cannot be trusted."""

    def __init__(
        self,
        files: FileSystem,
        path: Path,
        settings: LocalSettings,
        clock: Clock,
        worker: Worker,
        *,
        unmoved: Callable[[], int],
        still_full: Callable[[int | None], None],
        ended: Callable[[BaseException | None], None],
    ) -> None:
        self._files = files
        self._path = path
        self._settings = settings
        self._clock = clock
        self._worker = worker
        self._unmoved = unmoved
        self._still_full = still_full
        self._ended = ended
        self._timer: Timer | None = None
        self._is_stopped = False
        self._began = self._reminded = 0.0

    def wanted(self, error: LedgerStoreReadOnly, refused_bytes: int) -> None:
        """Nothing is written from now on, for this reason; `refused_bytes` were not."""
        log.error("the ledger store in %s is read-only: %s", self._path, error)
        self._began = self._reminded = self._clock.monotonic()
        self._arm(max(refused_bytes, _PROBE_BYTES))

    def stop(self) -> None:
        """Look no more, and say nothing of a look that is under way."""
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, size: int) -> None:
        self._timer = self._clock.call_later(self._settings.probe_seconds, self._probe, size)

    def _probe(self, size: int) -> None:
        self._timer = None
        self._worker.post(partial(self._try, max(size, self._unmoved())), partial(self._tried, size))

    def _try(self, size: int) -> tuple[int, int]:
        """Free bytes and how many there must be; if there are, a write of that size must succeed too: quotas are not seen in
        the free space."""
        needed = self._settings.reserve_bytes + max(self._settings.resume_bytes, size)
        free = self._files.free_bytes(self._path)
        if free >= needed:
            path = self._path / _PROBE_FILE
            file = self._files.open(path, create=True)
            try:
                for start in range(0, size, _PIECE_BYTES):
                    file.append(bytes(min(_PIECE_BYTES, size - start)))
                file.sync()
            except OSError as exc:
                if exc.errno not in FULL:
                    raise
                raise LedgerStoreReadOnly(no_space(self._path)) from exc
            finally:
                file.close()
                self._files.remove(path)
        return free, needed

    def _tried(self, size: int, found: tuple[int, int] | None, error: BaseException | None) -> None:
        if self._is_stopped:
            return
        if error is not None and not isinstance(error, LedgerStoreReadOnly):
            self._ended(error)
            return
        now = self._clock.monotonic()
        if found is not None and found[0] >= found[1]:
            log.warning("the ledger store in %s has room again and takes entries, after %.0f s", self._path, now - self._began)
            self._ended(None)
            return
        if now - self._reminded >= REMINDER_SECONDS:
            self._reminded = now
            room = no_space(self._path) if found is None else f"{found[0]} bytes are free, writing resumes with {found[1]}."
            log.warning("the ledger store in %s is read-only since %.0f s: %s", self._path, now - self._began, room)
        self._arm(size)
        self._still_full(None if found is None else found[0])
