"""The `local` ledger store: one shared journal with group commit, ledger files written lazily, replay after a crash."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from braid.errors import LedgerStoreFailed
from braid.ledger.backends.local.recovery import Recovered, recover
from braid.ledger.backends.local.store import LocalLedgerStore
from braid.ledger.config import LocalSettings
from braid.runtime.env import Runtime
from braid.runtime.files import DirectoryLock

log = logging.getLogger(__name__)

__all__ = ["LocalLedgerStore", "LocalSettings", "open_store"]


async def open_store(
    runtime: Runtime,
    *,
    path: Path,
    settings: LocalSettings | None = None,
    on_fatal: Callable[[BaseException], None] | None = None,
) -> LocalLedgerStore:
    """Open the store in `path`, made if missing; returns after the replay.

    `on_fatal` is called once, on the loop, when the disk failed in a way after which the process must end; without it the
    failure is only logged and everything is refused. Raises DataDirectoryBusy, StoreMismatch, EntryCorrupt or
    LedgerStoreFailed.
    """
    settings = settings or LocalSettings()
    if not settings.sync:
        log.warning("LEDGER SYNC IS OFF: confirmed messages in %s are lost if the machine loses power", path)
    worker = runtime.threads.worker("ledger-journal")
    try:
        lock, recovered = await worker.run(partial(_lock_and_recover, runtime, path, settings))
    except OSError as exc:
        await worker.close()
        raise LedgerStoreFailed(f"The ledger store in {path} cannot be opened: {exc}.") from exc
    except BaseException:
        await worker.close()
        raise
    return LocalLedgerStore(runtime, path, settings, recovered, lock, worker, on_fatal)


def _lock_and_recover(runtime: Runtime, path: Path, settings: LocalSettings) -> tuple[DirectoryLock, Recovered]:
    runtime.files.make_dir(path)
    lock = runtime.files.lock(path)
    try:
        return lock, recover(runtime.files, path, settings, lambda: runtime.random.getrandbits(64).to_bytes(8, "big"))
    except BaseException:
        lock.release()
        raise
