"""`Leading`: which broker leads the others, and what the leader does for all of them.

Owns the election among the brokers and the leader's two duties: to ask for at most one balancing move at a time (a hint; the
brokers concerned carry it out, see `ownership.py`) and to remove hints that nobody will follow. Must not take or give up
bundles itself. A leader that was replaced without knowing it does no harm: hints only ask (INV15).
"""

from __future__ import annotations

import logging

import msgspec

from braid.broker.balance import next_move
from braid.broker.bundles import BundleTable
from braid.broker.registry import BrokerInfo, Registry
from braid.errors import BraidError, InvariantBroken
from braid.metadata.api import MetadataStore
from braid.metadata.election import LeaderElection, Leadership
from braid.runtime.clock import Clock
from braid.runtime.tasks import Tasks

log = logging.getLogger(__name__)
LEADER = "/loadbalance/leader"


class _Candidate(msgspec.Struct, frozen=True, rename="camel"):
    """Who a candidate is; what else its record says is of no interest here."""

    broker_id: str = ""


class Leading:
    """See the module."""

    def __init__(
        self, metadata: MetadataStore, clock: Clock, registry: Registry, table: BundleTable, *, reconcile_seconds: float
    ) -> None:
        self._metadata = metadata
        self._clock = clock
        self._registry = registry
        self._table = table
        self._reconcile_seconds = reconcile_seconds
        self._election: LeaderElection | None = None

    @property
    def is_leader(self) -> bool:
        """Whether this broker leads. Ask before each act and keep no answer."""
        election = self._election
        return election is not None and election.leadership is not None and election.leadership.holds()

    async def leader(self) -> BrokerInfo | None:
        """The broker that leads; None while there is none."""
        record = None if self._election is None else await self._election.leader()
        return None if record is None else self._registry.get(_broker_id(record.value))

    def start(self, me: BrokerInfo, tasks: Tasks) -> None:
        """Stand for election."""
        candidate = msgspec.json.encode({"brokerId": me.broker_id, "incarnation": me.incarnation})

        def changed(leadership: Leadership | None) -> None:
            if len(self._registry.live()) > 1:
                log.info("the broker %s %s the brokers", me.broker_id, "no longer leads" if leadership is None else "leads")

        self._election = LeaderElection(
            self._metadata,
            self._clock,
            LEADER,
            candidate,
            on_change=changed,
            same=lambda value: _broker_id(value) == me.broker_id,  # an earlier run of this broker
            reconcile_seconds=self._reconcile_seconds,
        )
        tasks.spawn(self._election.start(), "leader")

    async def close(self) -> None:
        """Give up the leadership."""
        if self._election is not None:
            await self._election.close()

    def abandon(self) -> None:
        """Stop at once and give up nothing, as a crash would."""
        if self._election is not None:
            self._election.abandon()

    async def balance(self) -> bool:
        """One round: ask for at most one move. Only the leader's counts; False if there was nothing to do."""
        if not self.is_leader:
            return False
        takers = [info.broker_id for info in self._registry.takers()]
        if any(broker_id in takers for broker_id in self._table.hints().values()):
            return False  # one at a time
        move = next_move(self._table.assigned(takers))
        if move is None:
            return False
        log.info("balancing: %s moves to %s", move.key, move.destination)
        await self._table.put_hint(move.key, move.destination)
        return True

    async def balance_for_ever(self, every_seconds: float) -> None:
        """Round after round."""
        while True:
            await self._clock.sleep(every_seconds)
            try:
                await self.balance()
            except BraidError as error:
                log.warning("balancing failed, it is tried again later: %s", error)
            except InvariantBroken:
                raise
            except Exception:  # or this leader would never balance again
                log.exception("balancing failed in an unexpected way, it is tried again later")

    async def drop_spent_hints(self) -> None:
        """Remove the hints that were followed, and those to brokers that are gone. Only the leader does."""
        if not self.is_leader:
            return
        for key, broker_id in self._table.hints().items():
            owner = self._table.owner(key)
            if self._registry.get(broker_id) is None or (owner is not None and owner.broker_id == broker_id):
                await self._table.drop_hint(key)


def _broker_id(candidate: bytes) -> str:
    try:
        return msgspec.json.decode(candidate, type=_Candidate).broker_id
    except (msgspec.MsgspecError, ValueError):
        return ""  # nobody's that is known
