"""The `memory` backend: the engine without a journal. For tests and for clusters whose metadata may vanish with the process."""

from __future__ import annotations

from pathlib import Path

from braid.metadata.engine import DEFAULT_SESSION_TIMEOUT, Engine, Storage
from braid.metadata.journal import VolatileJournal
from braid.runtime.env import Runtime
from braid.runtime.threads import InlineThreads


async def open_store(runtime: Runtime, *, path: Path | None = None, session_timeout: float = DEFAULT_SESSION_TIMEOUT) -> Engine:
    """An empty store; `path` is taken for uniformity and not used. Commits still take a loop turn, as elsewhere."""
    storage = Storage(VolatileJournal(runtime.token(128)), InlineThreads().worker("metadata"))
    return await Engine.open(runtime, storage, session_timeout=session_timeout)
