"""Conformance: the stage on which candidates of an election meet each other and their faults.

Owns candidates (each a handle of its own behind a fault injector) and the watch over them: at no moment may two of them believe
that they lead, and each win has a higher epoch than the one before.
"""

from __future__ import annotations

import asyncio
import random  # noqa: TID251 - seeded by the case itself
from types import TracebackType
from typing import Self

from braid.metadata.api import MetadataStore, Record
from braid.metadata.election import LeaderElection, Leadership
from braid.runtime.tasks import Tasks
from braid.testing.conformance.metadata_world import StoreWorld, until, while_time_passes
from braid.testing.faulty_metadata import FaultyMetadata

RECONCILE = 2.0


class Candidate:
    """One holder with one handle and at most one election at a time."""

    def __init__(self, stage: Stage, name: str, store: FaultyMetadata) -> None:
        self.name = name
        self.store = store
        self.wins: list[Leadership] = []
        self.changes = 0
        self.is_dead = False
        self._stage = stage
        self.election = self._new_election()

    def _new_election(self) -> LeaderElection:
        stage = self._stage
        return LeaderElection(
            self.store,
            stage.world.clock,
            stage.key,
            self.name.encode(),
            on_change=self._changed,
            reconcile_seconds=RECONCILE,
        )

    def _changed(self, leadership: Leadership | None) -> None:
        self.changes += 1
        if leadership is not None:
            self.wins.append(leadership)
            self._stage.won(self, leadership)

    def leads(self) -> bool:
        return not self.is_dead and self.election.leadership is not None and self.election.leadership.holds()

    def believes(self) -> bool:
        """Whether any leadership it ever got says that it holds, as a careless holder would ask."""
        return any(leadership.holds() for leadership in self.wins)

    async def campaign_again(self) -> None:
        """With a new election, after the old one was closed."""
        self.election = self._new_election()
        await self.election.start()


class Stage:
    """Some candidates of one key; an async context manager that checks all the time and cleans up."""

    def __init__(self, world: StoreWorld, key: str = "/election/leader", *, seed: int = 0) -> None:
        self.world = world
        self.key = key
        self.candidates: list[Candidate] = []
        self.epochs: list[int] = []
        self.may_overlap = False
        """While a record was taken away by force, its holder cannot know yet."""
        self.overlaps = 0
        self.random = random.Random(seed)
        self._tasks = Tasks("stage")

    async def __aenter__(self) -> Self:
        self._tasks.spawn(self._watch(), "watch")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        await self._tasks.close()
        for candidate in self.candidates:
            candidate.store.is_cut = False
            candidate.store.faults.clear()
            candidate.store.thaw()
        for candidate in self.candidates:
            await while_time_passes(self.world, candidate.election.close())
        if exc is None:
            self.check()
            assert self.overlaps == 0, f"two candidates held {self.key} at once, {self.overlaps} times"

    async def add(self, name: str | None = None, *, campaigns: bool = True) -> Candidate:
        number = len(self.candidates)
        store = FaultyMetadata(await self.world.handle(), self.world.clock, random.Random(self.random.random()))
        candidate = Candidate(self, name or f"candidate{number}", store)
        self.candidates.append(candidate)
        if campaigns:
            await candidate.election.start()
        return candidate

    def won(self, candidate: Candidate, leadership: Leadership) -> None:
        self.check()
        if self.epochs and leadership.epoch == self.epochs[-1]:
            # The same record, adopted again after its holder was in doubt about its session.
            assert any(before.epoch == leadership.epoch for before in candidate.wins[:-1]), "two candidates share an epoch"
        else:
            assert not self.epochs or leadership.epoch > self.epochs[-1], f"epoch {leadership.epoch} after {self.epochs[-1]}"
            self.epochs.append(leadership.epoch)

    def check(self) -> None:
        """Two believers at once is what must never be."""
        if not self.may_overlap and sum(candidate.believes() for candidate in self.candidates) > 1:
            self.overlaps += 1

    async def _watch(self) -> None:
        while True:
            self.check()
            await asyncio.sleep(0)

    def leader(self) -> Candidate | None:
        return next((candidate for candidate in self.candidates if candidate.leads()), None)

    async def settled(self, *, other_than: Candidate | None = None) -> Candidate:
        """Wait until somebody (else) leads."""

        def is_settled() -> bool:
            leader = self.leader()
            return leader is not None and leader is not other_than

        await until(self.world, is_settled)
        leader = self.leader()
        assert leader is not None
        return leader

    # Ways to force a change

    async def resign(self, leader: Candidate) -> None:
        await while_time_passes(self.world, leader.election.close())
        await self.settled(other_than=leader)
        await while_time_passes(self.world, leader.campaign_again())

    async def delete(self, leader: Candidate) -> None:
        """Somebody removes the record by hand."""
        self.may_overlap = True
        before = leader.wins[-1]
        other = await self.world.handle()
        assert await other.delete(self.key)
        await until(self.world, lambda: not before.holds())
        self.may_overlap = False
        await other.close()

    async def expire(self, leader: Candidate) -> None:
        """The heartbeats of the leader get lost; the leader itself runs on."""
        await self.world.pause(leader.store.inner, leader.store.session.timeout * 1.5)

    async def pause(self, leader: Candidate) -> None:
        """The leader stops, is overtaken, and goes on as if nothing had happened."""
        before = leader.wins[-1]
        leader.store.freeze()
        await self.world.kill(leader.store.inner)
        await self.settled(other_than=leader)
        leader.store.thaw()
        assert not before.holds(), "a paused leader still believes in itself"
        await self.world.pause(leader.store.inner, 0)

    async def kill(self, leader: Candidate) -> None:
        """The leader is gone without a word; another candidate comes in its place."""
        leader.store.freeze()
        leader.is_dead = True
        await self.world.kill(leader.store.inner)
        await self.settled(other_than=leader)
        await self.add()


async def read(store: MetadataStore, key: str) -> Record | None:
    return await store.get(key, fresh=True)
