"""Lost ledgers: a record names them and their store does not know them (INV16).

That is never "there is nothing": messages, acknowledgments or a schema were in them. Whoever meets one refuses, by an error
that names the ledger, its store and what it belongs to; only with `managed_ledger.skip_lost_ledgers` it goes on, and says what
it gives up. No order of steps leaves such a record behind: a ledger is durable before a record names it, and is deleted after
no record does. Reasons are a store that was replaced, restored from another time, or deleted in part.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from braid.errors import LedgerLost, LedgerNotFound
from braid.ledger.api import LedgerStore
from braid.managedledger.api import LedgerResolver
from braid.managedledger.records import LedgerInfo

log = logging.getLogger(__name__)
ASKED_AT_ONCE = 64
MAX_SHOWN = 10


def lost(what: str, ledger_ids: Sequence[int], store: LedgerStore) -> LedgerLost:
    """The error of whoever needs these ledgers."""
    return LedgerLost(
        f"The store {store_name(store)} does not know {_ledgers(ledger_ids)}, which {what} needs; what was stored there is "
        "missing. Put the store's data back. To give it up and go on with the rest, set managed_ledger.skip_lost_ledgers."
    )


def given_up(what: str, ledger_ids: Sequence[int], store: LedgerStore, content: str) -> None:
    """Say what is lost for good."""
    log.error(
        "gave up %s of %s, which the store %s does not know (managed_ledger.skip_lost_ledgers): %s",
        _ledgers(ledger_ids),
        what,
        store_name(store),
        content,
    )


def store_name(store: LedgerStore) -> str:
    """What a store calls itself: its id, if it has one."""
    return str(getattr(store, "store_id", "") or type(store).__name__)


async def missing(resolver: LedgerResolver, infos: Sequence[LedgerInfo]) -> list[LedgerInfo]:
    """Those that their stores do not know."""

    async def is_missing(info: LedgerInfo) -> bool:
        try:
            await resolver.for_ledger(info.ledger_id, info.properties).metadata(info.ledger_id)
        except LedgerNotFound:
            return True
        return False

    found: list[LedgerInfo] = []
    for start in range(0, len(infos), ASKED_AT_ONCE):
        chunk = infos[start : start + ASKED_AT_ONCE]
        answers = await asyncio.gather(*map(is_missing, chunk)) if len(chunk) > 1 else [await is_missing(chunk[0])]
        found += [info for info, answer in zip(chunk, answers, strict=True) if answer]
    return found


def content_of(infos: Sequence[LedgerInfo], gone: Sequence[LedgerInfo]) -> str:
    """What the record tells of the ledgers that are gone: their messages by index."""
    before = dict(zip([info.ledger_id for info in infos[1:]], infos, strict=False))
    parts = []
    for info in gone[:MAX_SHOWN]:
        if not info.timestamp:
            parts.append(f"ledger {info.ledger_id} was being written, its messages are not known")
            continue
        previous = before.get(info.ledger_id)
        first = "up" if previous is None else previous.last_index + 1
        parts.append(f"ledger {info.ledger_id} had {info.entries} entries, messages {first} to {info.last_index}")
    return "; ".join(parts) + (f"; and {len(gone) - MAX_SHOWN} more" if len(gone) > MAX_SHOWN else "")


def _ledgers(ids: Sequence[int]) -> str:
    shown = ", ".join(map(str, ids[:MAX_SHOWN])) + (f" and {len(ids) - MAX_SHOWN} more" if len(ids) > MAX_SHOWN else "")
    return f"ledger {shown}" if len(ids) == 1 else f"ledgers {shown}"
