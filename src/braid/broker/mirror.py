"""`Mirror`: a copy in memory of the records below one key, kept by a watch and compared anew now and then.

Owns the watch and its repair. What it shows may be old: it is good for choosing whom to ask and for counting, never for
deciding who may act (INV15). `reload` is the reconcile; whoever owns the mirror calls it periodically.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic, TypeVar

from braid.errors import Closed, InvariantBroken, StoreError
from braid.metadata.api import Delete, MetadataStore, Put, Record
from braid.runtime.clock import Clock
from braid.runtime.tasks import Tasks

log = logging.getLogger(__name__)
T = TypeVar("T")
RETRY_SECONDS = 0.5


class Mirror(Generic[T]):
    """Values by full key. `decode` gives None for a record that is not to be shown; `changed` is called after each change."""

    def __init__(
        self,
        store: MetadataStore,
        clock: Clock,
        root: str,
        decode: Callable[[Record], T | None],
        changed: Callable[[], None] | None = None,
    ) -> None:
        self.values: dict[str, T] = {}
        self._store = store
        self._clock = clock
        self._root = root
        self._decode = decode
        self._changed = changed

    async def start(self, tasks: Tasks) -> None:
        """Load what is there, then follow it in a task."""
        await self.reload()
        tasks.spawn(self._follow(), f"mirror {self._root}")

    async def reload(self) -> None:
        """Compare with the store."""
        values: dict[str, T] = {}
        async with self._store.watch(self._root, recursive=True) as events:
            async for event in events:
                if not isinstance(event, Put):
                    break
                self._put(values, event.record)
        if values != self.values:
            self.values = values
            self._tell()

    def note(self, key: str, value: T | None) -> None:
        """Something this broker itself has just written: the watch tells it too, but later."""
        if value is None:
            self.values.pop(key, None)
        else:
            self.values[key] = value

    async def _follow(self) -> None:
        while True:
            try:
                async with self._store.watch(self._root, recursive=True) as events:
                    async for event in events:
                        if isinstance(event, Put):
                            self._put(self.values, event.record)
                        elif isinstance(event, Delete):
                            self.values.pop(event.key, None)
                        self._tell()
            except Closed:
                return
            except StoreError as error:
                log.info("the watch below %s ended and is set up again: %s", self._root, error)
            except InvariantBroken:
                raise
            except Exception:  # or nothing would ever be shown again but what a reload finds
                log.exception("the watch below %s failed and is set up again", self._root)
            await self._clock.sleep(RETRY_SECONDS)

    def _put(self, values: dict[str, T], record: Record) -> None:
        try:
            value = self._decode(record)
        except InvariantBroken:
            raise
        except Exception:  # its own concern: the others are shown
            log.exception("the record %s is not shown", record.key)
            value = None
        if value is None:
            values.pop(record.key, None)
        else:
            values[record.key] = value

    def _tell(self) -> None:
        if self._changed is None:
            return
        try:
            self._changed()
        except InvariantBroken:
            raise
        except Exception:  # a listener's mistake must not keep the copy from being right
            log.exception("a change below %s could not be told", self._root)
