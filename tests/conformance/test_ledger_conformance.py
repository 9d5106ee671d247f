"""The ledger conformance suite on both backends, `local` also with limits so small that every path is taken."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from braid.ledger.api import LedgerStore
from braid.ledger.backends import local, memory
from braid.runtime.env import Runtime
from braid.runtime.threads import InlineThreads
from braid.testing.conformance.ledger import LedgerStoreConformance
from braid.testing.files import ForgetfulFiles

TINY = local.LocalSettings(
    group_bytes=2048,
    segment_bytes=8192,
    checkpoint_bytes=65536,
    buffer_bytes=65536,
    tail_bytes=64,
    block_bytes=128,
    open_files=64,
    reserve_bytes=0,
)


class TestMemory(LedgerStoreConformance):
    @pytest.fixture
    async def store(self) -> AsyncIterator[LedgerStore]:
        store = await memory.open_store(Runtime())
        yield store
        await store.close()


class TestLocal(LedgerStoreConformance):
    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[LedgerStore]:
        store = await local.open_store(Runtime(), path=tmp_path / "ledgers")
        yield store
        await store.close()


class TestLocalTiny(LedgerStoreConformance):
    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[LedgerStore]:
        store = await local.open_store(Runtime(), path=tmp_path / "ledgers", settings=TINY)
        yield store
        await store.close()


class TestLocalSimulated(LedgerStoreConformance):
    @pytest.fixture
    async def store(self) -> AsyncIterator[LedgerStore]:
        runtime = replace(Runtime(), files=ForgetfulFiles(Random(1)), threads=InlineThreads(), random=Random(2))
        store = await local.open_store(runtime, path=Path("/data/ledgers"), settings=TINY)
        yield store
        await store.close()
