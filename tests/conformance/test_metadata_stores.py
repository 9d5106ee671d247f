"""The metadata conformance suite on the backends of this distribution, and what only durable ones must show."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from braid.metadata.backends import embedded, memory
from braid.testing import journal
from braid.testing.conformance.metadata import EngineWorld, MetadataStoreConformance, StoreWorld, kill_round


@pytest.mark.req("R473-19")
class TestMemory(MetadataStoreConformance):
    @pytest.fixture
    def make_world(self) -> Callable[[], StoreWorld]:
        return partial(EngineWorld, memory.open_store, is_durable=False)


@pytest.mark.req("R473-19")
class TestEmbedded(MetadataStoreConformance):
    @pytest.fixture
    def make_world(self, tmp_path: Path) -> Callable[[], StoreWorld]:
        return partial(EngineWorld, partial(embedded.open_store, path=tmp_path / "metadata"), is_durable=True)


@pytest.mark.req("R473-17")
@pytest.mark.inv("INV1")
@pytest.mark.parametrize("module", [embedded.__name__, journal.__name__])
async def test_nothing_acknowledged_is_lost_by_kill_9(module: str, tmp_path: Path) -> None:
    for round_number in range(6):
        wanted = 200 + 377 * round_number
        assert await kill_round(module, tmp_path / "metadata", acknowledged=wanted) >= wanted
