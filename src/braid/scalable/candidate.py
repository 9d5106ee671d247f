"""`TopicCandidate`: one broker's candidacy for the leadership of one topic, scalable or regular.

Owns what both kinds have in common: the campaign, the term of office that follows from a victory and ends with the leadership
(L-01), the end of all of it, and the calls about registered consumers that only a leader answers. What a term is, when one
begins and when it is ready is for the two kinds to say; this module must not know what leaders do.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from typing import Generic, Protocol, TypeVar

import msgspec

from braid.errors import Closed, LedElsewhere
from braid.metadata.api import MetadataStore
from braid.metadata.claims import StaleLeader
from braid.metadata.election import LeaderElection, Leadership
from braid.model.names import TopicName
from braid.runtime.env import Runtime
from braid.runtime.tasks import Tasks
from braid.scalable.api import ConsumerHandle, PlaceReport, RegistrationNumber
from braid.scalable.config import ScalableConfig
from braid.scalable.coordinator import SubscriptionCoordinator


class TermOfOffice(Protocol):
    """One time as the leader."""

    is_over: bool

    @property
    def leadership(self) -> Leadership: ...

    @property
    def coordinators(self) -> Mapping[str, SubscriptionCoordinator]:
        """Of subscriptions, by name."""
        ...

    def stop(self) -> None:
        """Do nothing more."""
        ...

    async def close(self) -> None:
        """Stop, and tell the consumers; writes nothing."""
        ...

    def kill(self) -> None:
        """As a crash."""
        ...


T = TypeVar("T", bound=TermOfOffice)


class TopicCandidate(ABC, Generic[T]):
    """See the module."""

    def __init__(
        self,
        runtime: Runtime,
        store: MetadataStore,
        config: ScalableConfig,
        topic: TopicName,
        *,
        broker_id: str,
        path: str,
        on_closed: Callable[[], None],
        may_win: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        """`path` is the record that the candidates create; `may_win` as of `LeaderElection`."""
        self.topic = topic
        self.broker_id = broker_id
        self._runtime = runtime
        self._store = store
        self._config = config
        self._on_closed = on_closed
        self._term: T | None = None
        self._closing: asyncio.Future[None] | None = None
        self._tasks = Tasks(f"controller {topic}")
        candidate = msgspec.json.encode(broker_id)
        self._election = LeaderElection(
            store,
            runtime.clock,
            path,
            candidate,
            on_change=self._leadership_changed,
            same=lambda value: value == candidate,
            may_win=may_win,
            reconcile_seconds=config.reconcile_seconds,
        )

    @abstractmethod
    def _new_term(self, leadership: Leadership) -> T | None:
        """The election was won: a term, which has begun; None if there is nothing to lead."""

    @abstractmethod
    async def _ready(self) -> T:
        """The term, once this leader serves. Raises LedElsewhere, NotReady and what else keeps it from serving."""

    @abstractmethod
    def _led_elsewhere(self) -> LedElsewhere:
        """The refusal of a broker that does not lead."""

    @property
    def leadership(self) -> Leadership | None:
        """Ours, while we lead. Ask it `holds()`."""
        return self._election.leadership

    @property
    def is_leading(self) -> bool:
        return self._term is not None and not self._term.is_over and self._term.leadership.holds()

    @property
    def is_closed(self) -> bool:
        return self._closing is not None

    async def close(self) -> None:
        """Give up the leadership and stop. Idempotent; returns when it is done."""
        if self._closing is not None:
            await asyncio.shield(self._closing)
            return
        self._closing = asyncio.get_running_loop().create_future()
        try:
            try:
                if (term := self._term) is not None:
                    await term.close()  # before the record goes: a successor finds nothing half done by us
                    await self._resigning(term)
            finally:  # or a candidate that nobody knows any more would lead on
                await self._election.close()
                await self._tasks.close()
        finally:
            self._on_closed()
            self._closing.set_result(None)

    def kill(self) -> None:
        """Stop as a crash would: nothing is written."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_future()
            self._closing.set_result(None)
        if self._term is not None:
            self._term.kill()
        self._election.abandon()
        self._tasks.cancel()

    async def unregister_consumer(self, subscription: str, consumer_name: str, handle: ConsumerHandle) -> None:
        """A consumer leaves for good."""
        coordinator = self._leading().coordinators.get(subscription)
        if coordinator is not None:
            try:
                await coordinator.unregister(consumer_name, handle)
            except (StaleLeader, Closed) as error:
                raise self._led_elsewhere() from error

    async def report_places(self, subscription: str, consumer_name: str, handle: ConsumerHandle, report: PlaceReport) -> None:
        """A member of a checkpoint group says where it stands. Raises NotReady if it is not known here as it was."""
        coordinator = self._leading().coordinators.get(subscription)
        if coordinator is None:
            raise self._led_elsewhere()
        try:
            await coordinator.report(consumer_name, handle, report)
        except (StaleLeader, Closed) as error:
            raise self._led_elsewhere() from error

    async def forget_consumer(self, subscription: str, consumer_name: str, number: RegistrationNumber) -> None:
        """A consumer left for good while nobody led the topic."""
        coordinator = (await self._ready()).coordinators.get(subscription)
        if coordinator is not None:
            try:
                await coordinator.forget(consumer_name, number)
            except (StaleLeader, Closed) as error:
                raise self._led_elsewhere() from error

    def consumer_disconnected(self, subscription: str, consumer_name: str, handle: ConsumerHandle) -> None:
        """A consumer's connection is gone; it may come back."""
        if self._term is not None and (coordinator := self._term.coordinators.get(subscription)) is not None:
            coordinator.disconnected(consumer_name, handle)

    async def _resigning(self, term: T) -> None:
        """The term is over, the leadership is about to be given up: the last moment for a word of this leader."""

    def _leading(self) -> T:
        if self._term is None or not self.is_leading:
            raise self._led_elsewhere()
        return self._term

    def _leadership_changed(self, leadership: Leadership | None) -> None:
        term, self._term = self._term, None
        if term is not None:
            term.stop()
            if self._closing is None:
                self._tasks.spawn(term.close(), "end of term")
        if leadership is not None and self._closing is None:
            self._term = self._new_term(leadership)

    def _close_soon(self) -> None:
        """Close, for a caller that cannot wait because closing ends it."""
        self._tasks.spawn(self.close(), "close")
