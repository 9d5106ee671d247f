"""The conformance suite of `MetadataStore`: what every backend must pass, ours and anyone else's.

    from braid.testing.conformance.metadata import MetadataStoreConformance, StoreWorld

    class TestMyStore(MetadataStoreConformance):
        @pytest.fixture
        def make_world(self) -> Callable[[], StoreWorld]:
            return MyWorld  # a class with the methods of StoreWorld

Needs pytest, hypothesis and pytest-asyncio in auto mode. Bad links are played by `braid.testing.faulty_metadata`, the same for
every backend; elections, locks and claims run on the store under test. Recorded histories are a suite of their own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from braid.testing.conformance.metadata_claims import ClaimCases
from braid.testing.conformance.metadata_elections import ElectionCases
from braid.testing.conformance.metadata_faults import FaultCases
from braid.testing.conformance.metadata_kill import kill_round
from braid.testing.conformance.metadata_listings import ListingCases
from braid.testing.conformance.metadata_locks import LockCases
from braid.testing.conformance.metadata_model import ModelCases
from braid.testing.conformance.metadata_records import RecordCases
from braid.testing.conformance.metadata_sessions import SessionCases
from braid.testing.conformance.metadata_watches import WatchCases
from braid.testing.conformance.metadata_world import EngineWorld, StoreWorld

__all__ = ["EngineWorld", "MetadataStoreConformance", "StoreWorld", "kill_round"]


class MetadataStoreConformance(
    RecordCases, ListingCases, SessionCases, WatchCases, ModelCases, FaultCases, ElectionCases, LockCases, ClaimCases
):
    """Subclass it and say how a world is made."""

    @pytest.fixture
    def make_world(self) -> Callable[[], StoreWorld]:
        raise NotImplementedError("a conformance suite must define the fixture make_world")

    @pytest.fixture
    async def world(self, make_world: Callable[[], StoreWorld]) -> AsyncIterator[StoreWorld]:
        """A fresh store, closed afterwards."""
        made = make_world()
        yield made
        await made.close()
