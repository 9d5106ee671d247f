"""The cases of `test_spoilt_records.py`: which record, which edit, and whether a broker finds it or has it edited under it.

Run as a program (`make spoilt`), it goes through all of them and prints what must not be; the tests take a few of each kind.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import sys
from collections.abc import Iterator
from typing import NamedTuple

from tests.unit.broker.record_kinds import DURABLE, EPHEMERAL, kind_of
from tests.unit.broker.spoilt import HEALTHY, LEDGER, Kept, SpoiltWorld, edits, made_image
from tests.unit.broker.spoilt_use import Outcome, Web, faults, run_case

from braid.metadata.journal import VALUE, Row

LEDGERS = "record in a ledger"
KINDS = (*DURABLE, LEDGERS, *EPHEMERAL)
SAME_AGAIN = ("/4000-7fff-3", "/8000-ffff-1", "/parted-partition-1")
"""Segments and partitions whose records are as those of others that are edited."""
NEVER_LIVE = ("hint", "operation of a transaction", LEDGERS)
"""Records that are gone, or are not read again, when a broker was used."""


class Case(NamedTuple):
    """One edit of one record."""

    kind: str
    key: str
    """As in the image; of a live case, the key that a broker of this case has is looked up by its kind."""
    what: str
    number: int
    """Of the edit, for this record."""
    is_live: bool


class Spoilt:
    """Everything that cases share."""

    def __init__(self, kept: Kept, web: Web, at_rest: Outcome, live: Outcome, rows: dict[str, Row]) -> None:
        self._kept = kept
        self._web = web
        self._usual = {False: at_rest, True: live}
        self._rows = rows

    @classmethod
    async def make(cls) -> Spoilt:
        kept, web, rows = await made_image(), Web(), dict[str, Row]()

        def look(world: SpoiltWorld) -> dict[str, bytes]:
            rows.update(world.metadata.tables.rows)
            return {}

        found = cls(kept, web, await run_case(web, kept, {}), await run_case(web, kept, {}, look), rows)
        for outcome in found._usual.values():
            assert not outcome.refusals and not outcome.logged.crashes, (outcome.refusals, outcome.logged.crashes)
        return found

    def cases(self, kind: str) -> list[Case]:
        """All of a kind of record: those that a broker finds, then those that are edited under it."""
        at_rest = self._kept.keys() if kind in DURABLE else _ledgers(self._kept) if kind == LEDGERS else []
        found = [
            Case(kind, key, what, number, False)
            for key in at_rest
            if kind in (LEDGERS, kind_of(key)) and _may_be_edited(key)
            for number, (what, _value) in enumerate(edits(self._kept.value(key)))
        ]
        if kind in NEVER_LIVE:
            return found
        one = _one_of(kind, self._rows)
        assert one is not None, f"no broker has written a {kind}"
        key, row = one
        return found + [Case(kind, key, what, number, True) for number, (what, _value) in enumerate(edits(row[VALUE]))]

    async def faults(self, case: Case) -> list[str]:
        """What must not be, in words."""
        key = case.key
        if not case.is_live:
            value = list(edits(self._kept.value(key)))[case.number][1]
            outcome = await run_case(self._web, self._kept, {key: value})
        else:

            def edit(world: SpoiltWorld) -> dict[str, bytes]:
                nonlocal key
                found = _one_of(case.kind, world.metadata.tables.rows)
                if found is None:
                    return {}  # its time was over, in this world
                key, row = found
                return {key: dict(edits(row[VALUE])).get(case.what, b"")}

            outcome = await run_case(self._web, self._kept, {}, edit)
        return faults(key, outcome, self._kept, self._usual[case.is_live])


def _ledgers(kept: Kept) -> Iterator[str]:
    """Ledgers in which cursors and schemas keep what is too long for a record, of topics that may suffer."""
    for number, found in kept.ledgers.items():
        if (
            found.entries
            and found.custom["component"] != b"managed-ledger"
            and HEALTHY.encode() not in found.custom["braid/name"]
        ):
            yield f"{LEDGER}{number}"


def _may_be_edited(key: str) -> bool:
    return HEALTHY not in key and key != "/admin/tenants/acme" and not any(each in key for each in SAME_AGAIN)


def _one_of(kind: str, rows: dict[str, Row]) -> tuple[str, Row] | None:
    """The first record of a kind that may be edited."""
    keys = (key for key in sorted(rows) if kind_of(key) == kind and _may_be_edited(key) and "pulsar" not in key)
    return next(((key, rows[key]) for key in keys), None)


async def _run(kinds: list[str], count: int, seed: int) -> int:
    spoilt, chance, bad = await Spoilt.make(), random.Random(seed), 0
    for kind in kinds:
        cases = spoilt.cases(kind)
        cases = cases if count == 0 else chance.sample(cases, min(count, len(cases)))
        failed = 0
        for case in cases:
            if found := await spoilt.faults(case):
                failed += 1
                print(f"{case.key}: {case.what}{' while the broker runs' if case.is_live else ''}")
                for each in found:
                    print(f"    {each[:500]}", flush=True)
        print(f"{kind}: {len(cases)} cases, {failed} failed", flush=True)
        bad += failed
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", action="append", help="of record; all if none is given")
    parser.add_argument("--count", type=int, default=0, help="of cases of each kind, chosen by chance; 0 = all")
    parser.add_argument("--seed", type=int, default=0, help="of that chance")
    arguments = parser.parse_args()
    logging.getLogger("braid").propagate = False
    return 1 if asyncio.run(_run(arguments.kind or list(KINDS), arguments.count, arguments.seed)) else 0


if __name__ == "__main__":
    sys.exit(main())
