"""`LeaderElection`: at most one candidate of a key leads, and everybody can find out who.

Owns the leader's record: an ephemeral one, written once by the winner and never updated, so that all observers see the same
epoch. A candidate campaigns in the background until it is closed: it tries to create the record, watches it, and tries again
when it goes. It steps down when its session is lost or may be (`good_until` passed), when the record is gone or is no longer
the one it wrote; after that it deletes nothing but the very record it led with, by version, because another one may be its
successor's. So every time in office has a higher epoch than all before it, also of the same candidate. Resigning deletes by
version.

Leading excludes nobody: a paused leader can wake up after its time. Each act of a leader therefore asks `holds()` and each
write carries the epoch (`braid.metadata.claims`, INV4). Watches are hints: the record is also looked at every
`reconcile_seconds` (INV15). One election per key and handle.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from braid.errors import Closed, InvariantBroken, StoreError, VersionConflict
from braid.metadata.api import MetadataStore, Record, Session
from braid.metadata.tenure import DEFAULT_RECONCILE_SECONDS, RETRY_SECONDS, Tenure, drop_nobodys, is_own, remove, take
from braid.runtime.clock import Clock
from braid.runtime.tasks import Tasks

log = logging.getLogger(__name__)


class Leadership:
    """Our time in office: one win of one election."""

    __slots__ = ("_numbers", "_poke", "_tenure", "epoch", "key")

    def __init__(self, tenure: Tenure, poke: Callable[[], None]) -> None:
        self.key = tenure.key
        self.epoch = tenure.epoch
        """Strictly larger for every later leader of the same key."""
        self._tenure = tenure
        self._poke = poke
        self._numbers = 0

    def next_number(self) -> int:
        """1, 2, ...: with the epoch, something higher than whatever was given before, whoever led and whoever asks."""
        self._numbers += 1
        return self._numbers

    def holds(self) -> bool:
        """Whether we may act as the leader now. Ask before each act and keep no answer."""
        return self._tenure.holds()

    def step_down(self) -> None:
        """Lead no longer, from now on; the election gives the record up and campaigns anew."""
        self._tenure.is_over = True
        self._poke()


class LeaderElection:
    """One candidate of one key."""

    def __init__(
        self,
        store: MetadataStore,
        clock: Clock,
        key: str,
        candidate: bytes,
        *,
        on_change: Callable[[Leadership | None], None] | None = None,
        same: Callable[[bytes], bool] | None = None,
        may_win: Callable[[], Awaitable[bool]] | None = None,
        reconcile_seconds: float = DEFAULT_RECONCILE_SECONDS,
    ) -> None:
        """`candidate` is the record's value and must name this incarnation of the candidate. `on_change` is told of our own
        leadership and of its end. `same` recognises a record that an earlier incarnation of this candidate left behind; such a
        record is removed once, at the first attempt, instead of waiting for its session to end. `may_win` is asked before the
        record is created, when nobody leads: whether there is still something to lead."""
        self.leadership: Leadership | None = None
        """Ours, while we lead. Ask it `holds()`."""
        self._store = store
        self._clock = clock
        self._key = key
        self._candidate = candidate
        self._on_change = on_change
        self._same = same
        self._may_win = may_win
        self._reconcile = reconcile_seconds
        self._tenure: Tenure | None = None
        self._led = -1  # epoch of our last time in office
        self._unwanted: Tenure | None = None  # over, but its record could not be removed yet
        self._hint = asyncio.Event()
        self._is_settled = asyncio.Event()  # after the first attempt
        self._is_closing = False
        self._is_closed = asyncio.Event()
        self._tasks = Tasks(f"election {key}")
        self._campaign: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Campaign in the background from now on, until closed. Returns after the first attempt."""
        if self._is_closing:
            raise Closed(f"The election {self._key} was closed.")
        if self._campaign is None:
            self._tasks.spawn(self._listen(), "listen")
            self._campaign = self._tasks.spawn(self._run(), "campaign")
        await self._is_settled.wait()

    async def leader(self, *, fresh: bool = False) -> Record | None:
        """The record of whoever leads; works without `start` too. Read each time, so a settled leader is never missed."""
        return await self._store.get(self._key, fresh=fresh)

    async def close(self) -> None:
        """Resign and stop. Idempotent."""
        if self._is_closing:
            await self._is_closed.wait()
            return
        self._is_closing = True
        self._hint.set()
        try:
            if self._campaign is not None:
                # A put under way must end first, or its record would stay without a leader. Nothing outlives the session.
                patience = self._clock.call_later(self._store.session.timeout, self._campaign.cancel)
                await asyncio.wait([self._campaign])
                patience.cancel()
            await self._tasks.close()
            tenure = self._tenure or self._unwanted
            self._step_down()
            await self._resign(tenure)
        finally:
            self._is_closed.set()

    def abandon(self) -> None:
        """Stop at once and leave everything as it is, as a killed process would; the record goes with the session."""
        self._is_closing = True
        self._is_closed.set()
        self._tasks.cancel()

    async def _run(self) -> None:
        try:
            while not self._is_closing:
                self._hint.clear()
                delay = await self._attempt()
                self._is_settled.set()
                timer = self._clock.call_later(delay, self._hint.set)
                try:
                    await self._hint.wait()
                finally:
                    timer.cancel()
        except Closed:
            self._step_down()  # the handle is gone, and the record with it
        finally:
            self._is_settled.set()

    async def _listen(self) -> None:
        """Turn watch events into hints."""
        while True:
            try:
                async with self._store.watch(self._key) as events:
                    async for _event in events:
                        self._hint.set()
            except StoreError as error:
                log.info("the watch on %s ended and is set up again: %s", self._key, error)
            except Closed:
                self._hint.set()
                return
            except InvariantBroken:
                raise
            except Exception:
                log.exception("the watch on %s failed and is set up again", self._key)
            await self._clock.sleep(RETRY_SECONDS)
            self._hint.set()

    async def _attempt(self) -> float:
        """Look at everything once; returns seconds until the next look if no hint comes."""
        try:
            if self._tenure is not None:
                await self._check(self._tenure)
            if self._unwanted is not None and await self._remove(self._unwanted.version, self._unwanted.session):
                self._unwanted = None
            if self._tenure is None and self._unwanted is None:
                await self._try_to_win()
        except StoreError as error:
            log.info("the election %s waits for the metadata store: %s", self._key, error)
            delay = min(RETRY_SECONDS, self._reconcile)
        except (Closed, InvariantBroken):
            raise
        except Exception:  # or nobody would ever look at this office again
            log.exception("the election %s failed in an unexpected way and is looked at again", self._key)
            delay = self._reconcile
        else:
            delay = self._reconcile if self._unwanted is None else RETRY_SECONDS
        return delay if self._tenure is None else max(0.0, min(delay, self._tenure.seconds_left()))

    async def _check(self, tenure: Tenure) -> None:
        """Still in office?"""
        if tenure.is_over:
            self._unwanted = tenure
            self._step_down()
        elif tenure.has_lapsed():
            self._step_down()
        elif not tenure.is_shown_by(await self._store.get(self._key, fresh=True)):
            if not tenure.has_lapsed():
                log.warning("the leader record %s was taken away from us", self._key)
            self._step_down()

    async def _try_to_win(self) -> None:
        found = await self._store.get(self._key, fresh=True)
        same, self._same = self._same, None  # once: two live processes with one name must not depose each other for ever
        if found is not None and same is not None and found.owner != self._store.session.id and same(found.value):
            await self._remove_leftover(found)
            found = None
        if found is not None and found.owner is None:
            await drop_nobodys(self._store, found)
            found = None
        if found is not None and not is_own(self._store, found, self._candidate):
            return
        # Left from a time in office that ended when a deadline passed; the session lives on. What that time left under way
        # carries its epoch, so the next one must have a higher one, be it ours or another's.
        is_left = found is not None and found.version == self._led
        if is_left and not await self._remove(self._led, self._store.session):
            return
        if self._may_win is not None and not await self._may_win():
            return
        # An own record that never was in office, after a put without a verdict, is as good as a new one.
        result = await take(self._store, self._clock, self._key, self._candidate, adopt=True)
        if isinstance(result, Tenure) and result.epoch > self._led and result.holds():
            self._take_office(result)

    async def _remove_leftover(self, record: Record) -> None:
        try:
            await self._store.delete(self._key, expected=record.version)
        except VersionConflict:
            log.info("the leftover leader record %s went by itself", self._key)

    async def _resign(self, tenure: Tenure | None) -> None:
        """Remove our record if there is one."""
        try:
            if tenure is not None:
                await self._remove(tenure.version, tenure.session)
            elif self._campaign is not None:  # a put without a verdict may have left one
                found = await self._store.get(self._key, fresh=True)
                if found is not None and is_own(self._store, found, self._candidate):
                    await self._remove(found.version, self._store.session)
        except StoreError as error:
            log.warning("the leader record %s stays until its session ends: %s", self._key, error)
        except Closed:
            pass  # the record went with the handle

    async def _remove(self, version: int, session: Session) -> bool:
        is_removed = await remove(self._store, self._clock, self._key, version, session)
        if not is_removed:
            log.warning("the leader record %s could not be removed and stays for now", self._key)
        return is_removed

    def _take_office(self, tenure: Tenure) -> None:
        self._tenure = tenure
        self._led = tenure.epoch
        self.leadership = Leadership(tenure, self._hint.set)
        log.debug("leading %s with epoch %d", self._key, tenure.epoch)
        self._tell(self.leadership)

    def _step_down(self) -> None:
        if self._tenure is None:
            return
        self._tenure.is_over = True  # before the record goes, so that no successor overlaps
        log.debug("no longer leading %s (epoch %d)", self._key, self._tenure.epoch)
        self._tenure = self.leadership = None
        self._tell(None)

    def _tell(self, leadership: Leadership | None) -> None:
        if self._on_change is not None:
            try:
                self._on_change(leadership)
            except Exception:  # a listener's mistake must not leave the key without a campaign
                log.exception("the listener of the election %s failed", self._key)
