"""`Members`: the registered consumers of one subscription, in the leader's memory and in the records.

Owns who is registered, how long a consumer without a connection stays (its grace period), and that the records follow: the
assignment as it is in memory, and the removal of those who are gone. Must not decide who reads what, nor tell anybody: that is
the coordinator's part, which calls all of this in its turn.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Final

from braid.errors import StoreError
from braid.metadata.claims import StaleLeader
from braid.runtime.clock import Clock, Timer
from braid.scalable.records import RegistrationRecord
from braid.scalable.sessions import ConsumerSession, Registrations, absent_since, given, grace_left

log = logging.getLogger(__name__)
RETRY_SECONDS: Final = 0.5
"""Before the store is asked again after a failure."""


class Members:
    """See the module. `changed` is called when there is something to do: a grace period has ended, or a removal failed."""

    def __init__(
        self,
        clock: Clock,
        registrations: Registrations,
        subscription: str,
        *,
        grace_seconds: float,
        changed: Callable[[], None],
    ) -> None:
        self.sessions: dict[str, ConsumerSession] = {}
        """By name."""
        self.idle_since_ms = clock.now_ms()
        """Since when there is nobody, while that is so."""
        self.restored_ms = clock.now_ms()
        """When the records were read."""
        self._clock = clock
        self._registrations = registrations
        self._subscription = subscription
        self._grace_seconds = grace_seconds
        self._changed = changed
        self._leftovers: set[str] = set()  # records of consumers that are gone
        self._again: Timer | None = None

    async def claim(self, now_ms: int) -> dict[str, RegistrationRecord]:
        """Everyone the records name, each record claimed by writing when its consumer was first found absent."""
        found = await self._registrations.load()
        return await self._registrations.save_all({name: absent_since(now_ms) for name in found})

    def take_over(self, claimed: Mapping[str, RegistrationRecord], now_ms: int) -> None:
        """These are registered, all of them without a connection, and what is left of their grace periods begins."""
        self.restored_ms = now_ms
        for name, registration in claimed.items():
            session = self.sessions[name] = ConsumerSession(name, registration)
            session.disconnected_ms = registration.absent_since_ms
            self._begin_grace(session, grace_left(registration.absent_since_ms, now_ms, self._grace_seconds))

    def join(self, name: str, saved: RegistrationRecord) -> ConsumerSession:
        """A new consumer, whose record is written. Its grace period begins, should its registration fail from here on."""
        self._leftovers.discard(name)
        session = self.sessions[name] = ConsumerSession(name, saved)
        self.start_grace(session)
        return session

    def owe_removal(self, name: str) -> None:
        """The record of this name is about to be written: until `join` it is one of nobody, whatever becomes of the write."""
        self._leftovers.add(name)

    def drop(self, session: ConsumerSession) -> None:
        """Forget a consumer; `remove_leftovers` removes its record."""
        session.stop_grace()
        del self.sessions[session.name]
        self._leftovers.add(session.name)
        if not self.sessions:
            self.idle_since_ms = self._clock.now_ms()

    async def remove_leftovers(self, *, must: bool = False) -> None:
        """Remove the records of those who are gone; what fails is tried again later. Raises StaleLeader, and with `must` also
        StoreError: a record that is still there tells the next leader that what it names was assigned."""
        for name in sorted(self._leftovers):
            try:
                await self._registrations.remove(name)
            except StaleLeader:
                raise
            except StoreError as error:
                log.warning("the registration of %s in %s will be removed later: %s", name, self._subscription, error)
                self.try_again()
                if must:
                    raise
                return
            self._leftovers.discard(name)

    async def write(self, epoch: int, *, losses_first: bool = False) -> None:
        """Bring the assignments in the records up to date with those in memory, made from the layout of this epoch.
        `losses_first`: at no moment do two records have the same segment."""
        if losses_first:
            await self._save(
                epoch, {name: tuple(n for n in each.saved if n in each.kept) for name, each in self.sessions.items()}
            )
        await self._save(epoch, {name: each.kept for name, each in self.sessions.items()})

    async def _save(self, epoch: int, assigned: Mapping[str, tuple[int, ...]]) -> None:
        sessions = {
            name: session
            for name, segments in assigned.items()
            if (session := self.sessions[name]).is_in_doubt or session.saved != segments
        }
        for name, session in sessions.items():  # until the answer is here; a write may be applied and have none
            session.saved = tuple(dict.fromkeys((*session.saved, *assigned[name])))
            session.is_in_doubt = True

        def is_saved(name: str) -> None:
            sessions[name].saved, sessions[name].is_in_doubt = assigned[name], False

        await self._registrations.save_all({name: given(epoch, assigned[name]) for name in sessions}, is_saved)

    def start_grace(self, session: ConsumerSession) -> None:
        """The consumer has no connection: it has the full period to come back."""
        self._begin_grace(session, self._grace_seconds)

    def expire(self, session: ConsumerSession) -> None:
        """The consumer need not be waited for any more."""
        session.is_expired = True
        self._changed()

    def expired(self) -> list[ConsumerSession]:
        """Those who did not come back in time."""
        return [each for each in self.sessions.values() if each.is_expired and not each.is_connected]

    def try_again(self) -> None:
        """The store failed: `changed` is called after a while, once, however often that is asked for meanwhile. Were it once
        for each failure, each call would make more of them, and a store that is away would be asked without a pause."""
        if self._again is None:
            self._again = self._clock.call_later(RETRY_SECONDS, self._now_again)

    def _now_again(self) -> None:
        self._again = None
        self._changed()

    def stop(self) -> None:
        """End all grace periods: nobody is evicted here any more."""
        for session in self.sessions.values():
            session.stop_grace()
        if self._again is not None:
            self._again.cancel()

    def _begin_grace(self, session: ConsumerSession, seconds: float) -> None:
        session.stop_grace()
        session.evicted_at_ms = self._clock.now_ms() + int(seconds * 1000)
        session.grace = self._clock.call_later(seconds, self.expire, session)
