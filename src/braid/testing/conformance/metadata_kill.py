"""Conformance: kill -9 of a process that writes, then a check of what it left (point 12 of the suite).

`python -m braid.testing.conformance.metadata_kill MODULE DIR` opens the store that `MODULE.open_store` keeps in DIR, writes
from many tasks at once and reports each acknowledged write on standard output until it is killed. `kill_round` runs it, kills
it and checks the directory: every acknowledged write is there, what was kept is a prefix of what was issued (commits are
whole), and every record has its index entry.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from braid.metadata.api import IndexSpan, MetadataStore, Span
from braid.metadata.engine import Engine
from braid.runtime.env import Runtime
from braid.testing.conformance.metadata_world import PATIENCE, collect, collect_names

WRITERS = 24

OpenStore = Callable[..., Awaitable[Engine]]


async def kill_round(module: str, directory: Path, *, acknowledged: int) -> int:
    """Let a child write until `acknowledged` writes were reported, kill it, check; returns how many it had reported."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, module, str(directory), stdout=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    lines: list[str] = []
    try:
        async with asyncio.timeout(PATIENCE):
            while len(lines) < acknowledged and (line := await child.stdout.readline()):
                lines.append(line.decode())
    finally:
        if child.returncode is None:
            child.kill()
    lines += (await child.stdout.read()).decode().splitlines(keepends=True)
    await child.wait()
    whole = [line.split() for line in lines if line.endswith("\n")]  # the kill may cut the last line
    assert len(whole) >= acknowledged, "the child ended before it was killed"
    root = await importlib.import_module(module).open_store(Runtime(), path=directory)
    try:
        await _check(root, [(key, int(version)) for key, version in whole])
    finally:
        await root.close()
    return len(whole)


async def _check(root: Engine, acknowledged: list[tuple[str, int]]) -> None:
    store: MetadataStore = root.handle("checker")
    for key, version in acknowledged:
        if key.startswith("/kill/counter"):
            found = await store.get(key)
            assert found is not None, f"{key} was acknowledged and lost"
            assert found.version >= version, f"{key} went back from version {version} to {found.version}"
        else:
            found = await store.get(key, partition="p")
            assert found is not None, f"{key} was acknowledged and lost"
            assert found.version == version
    assert root.commit_counter >= max(version for _, version in acknowledged)
    numbers = [int(name[2:]) for name in await collect_names(store.names(Span("/kill-seq")))]
    assert numbers == list(range(1, len(numbers) + 1)), "a commit was kept in part"
    indexed = [record.name for record in await collect(store.scan(IndexSpan("kill-index")))]
    assert sorted(indexed) == await collect_names(store.names(Span("/kill-seq"))), "a record and its index entry were parted"
    assert await collect(store.scan(Span("/kill-eph"))) == [], "an ephemeral survived its process"


async def write_until_killed(open_store: OpenStore, directory: Path) -> None:
    root = await open_store(Runtime(), path=directory)
    store: MetadataStore = root.handle("victim")

    def report(key: str, version: int) -> None:
        sys.stdout.write(f"{key} {version}\n")
        sys.stdout.flush()

    async def appender() -> None:
        while True:
            record = await store.append("/kill-seq/s", b"x" * 100, partition="p", index={"kill-index": "x"})
            report(record.key, record.version)

    async def counter(number: int) -> None:
        while True:
            record = await store.put(f"/kill/counter{number}", b"y" * 50)
            report(record.key, record.version)

    await store.put("/kill-eph/k", b"", ephemeral=True)
    async with asyncio.TaskGroup() as group:
        for number in range(WRITERS):
            group.create_task(counter(number) if number % 3 == 0 else appender())


if __name__ == "__main__":
    asyncio.run(write_until_killed(importlib.import_module(sys.argv[1]).open_store, Path(sys.argv[2])))
