"""`SchemaStorage`: the schemas of topics, one ledger with one entry per version, found through one locator record per topic.

Owns the locator record `/schemas/<schema id>` and the schema ledgers. A version is durable in its ledger before the CAS lists
it; a lost race deletes the ledger and starts over. No compatibility rules here.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping

import msgspec

from braid.errors import BraidError, LedgerNotFound, NotAllowed, NotReady, OutcomeUnknown, StoreMismatch, VersionConflict
from braid.managedledger.api import LedgerResolver
from braid.managedledger.labels import ledger_labels
from braid.managedledger.lost import given_up, lost
from braid.managedledger.owned_record import ConflictInDoubt, swap
from braid.managedledger.records import FORMAT_VERSION, check_version
from braid.metadata.api import ABSENT, MetadataStore
from braid.runtime.env import Runtime

log = logging.getLogger(__name__)
ATTEMPTS = 20
MAX_VERSIONS = 2000
"""Versions of one topic; keeps the locator record far below what a metadata store takes."""

MAX_GIVEN_UP = 10_000


class StoredSchema(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One version of a topic's schema."""

    format_version: int = FORMAT_VERSION
    version: int
    type: int
    """Number of the wire's schema type."""
    data: bytes
    name: str = ""
    properties: dict[str, str] = {}
    timestamp: int = 0


class SchemaPosition(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Where a version is stored."""

    ledger_id: int
    entry_id: int = 0
    properties: dict[str, str] = {}


class SchemaIndex(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A version in the locator."""

    version: int
    type: int
    hash: str
    position: SchemaPosition


class SchemaLocator(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """`/schemas/<schema id>`. Oldest version first; the last one is the latest."""

    format_version: int = FORMAT_VERSION
    versions: tuple[SchemaIndex, ...]


class SchemaStorage:
    """Puts and gets schemas. `schema_id` is `<tenant>/<namespace>/<encoded topic>`."""

    def __init__(
        self, runtime: Runtime, metadata: MetadataStore, resolver: LedgerResolver, *, skip_lost_ledgers: bool = False
    ) -> None:
        self._clock = runtime.clock
        self._metadata = metadata
        self._resolver = resolver
        self._skip_lost_ledgers = skip_lost_ledgers
        self._given_up: set[int] = set()
        """Lost ledgers of which the log tells already."""

    async def put(
        self, schema_id: str, type: int, data: bytes, properties: Mapping[str, str] | None = None, name: str = ""
    ) -> int:
        """Store a schema and return its version, 0 for the first; the same type and data again is the same version."""
        key = locator_key(schema_id)
        digest = hashlib.sha256(data).hexdigest()
        for _attempt in range(ATTEMPTS):
            locator, expected = await self._locator(key)
            for index in locator.versions:
                if index.type == type and index.hash == digest:
                    return index.version
            if len(locator.versions) >= MAX_VERSIONS:
                raise NotAllowed(f"The schema {schema_id} already has {MAX_VERSIONS} versions; delete it or use another topic.")
            version = locator.versions[-1].version + 1 if locator.versions else 0
            schema = StoredSchema(
                version=version,
                type=type,
                data=data,
                name=name,
                properties=dict(properties or {}),
                timestamp=self._clock.now_ms(),
            )
            position = await self._write(schema_id, schema)
            index = SchemaIndex(version=version, type=type, hash=digest, position=position)
            grown = SchemaLocator(versions=(*locator.versions, index))
            try:
                await swap(self._metadata, key, msgspec.json.encode(grown), expected)
            except OutcomeUnknown:
                raise  # the locator may name the ledger
            except ConflictInDoubt:
                continue  # the same, as others have grown it since
            except BraidError as error:
                await self._discard(position)
                if isinstance(error, VersionConflict):
                    continue
                raise
            return version
        raise NotReady(f"The schema {schema_id} is being changed by others all the time; try again.")

    async def get(self, schema_id: str, version: int | None = None) -> StoredSchema | None:
        """That version, or the latest; None if there is none."""
        key = locator_key(schema_id)
        for _attempt in range(ATTEMPTS):
            locator, _version = await self._locator(key)
            for index in reversed(locator.versions):
                if version is None or index.version == version:
                    try:
                        return await self._read(index)
                    except LedgerNotFound:
                        if await self._is_listed(key, index):
                            self._lost(schema_id, index)
                            continue  # with an older version, if any will do
                        break  # deleted meanwhile
            else:
                return None
        raise NotReady(f"The schema {schema_id} is being changed by others all the time; try again.")

    async def latest(self, schema_id: str) -> StoredSchema | None:
        """The latest version, None if there is no schema."""
        return await self.get(schema_id)

    async def versions(self, schema_id: str) -> list[StoredSchema]:
        """All versions, oldest first."""
        locator, _version = await self._locator(locator_key(schema_id))
        found = [await self.get(schema_id, index.version) for index in locator.versions]
        return [schema for schema in found if schema is not None]

    async def delete(self, schema_id: str) -> bool:
        """Remove all versions: the locator, then the ledgers. False if there was no schema."""
        key = locator_key(schema_id)
        for _attempt in range(ATTEMPTS):
            locator, expected = await self._locator(key)
            if expected == ABSENT:
                return False
            try:
                await self._metadata.delete(key, expected=expected)
            except VersionConflict:
                continue
            for index in locator.versions:
                await self._discard(index.position)
            return True
        raise NotReady(f"The schema {schema_id} is being changed by others all the time; try again.")

    async def _locator(self, key: str) -> tuple[SchemaLocator, int]:
        found = await self._metadata.get(key, fresh=True)
        if found is None:
            return SchemaLocator(versions=()), ABSENT
        return decode_locator(key, found.value), found.version

    async def _write(self, schema_id: str, schema: StoredSchema) -> SchemaPosition:
        writer = await self._resolver.active().create(custom=ledger_labels("schema", schema_id, ""))
        await writer.add(msgspec.msgpack.encode(schema))
        await writer.close()
        return SchemaPosition(ledger_id=writer.ledger_id)

    async def _read(self, index: SchemaIndex) -> StoredSchema:
        position = index.position
        where = f"schema ledger {position.ledger_id}"
        reader = await self._resolver.for_ledger(position.ledger_id, position.properties).open(position.ledger_id, fence=False)
        try:
            data = (await reader.read(position.entry_id, position.entry_id))[0]
        finally:
            await reader.close()
        try:
            schema = msgspec.msgpack.decode(data, type=StoredSchema)
        except msgspec.DecodeError as exc:
            raise StoreMismatch(f"The entry of {where} is not a schema ({exc}).") from exc
        check_version(schema.format_version, where)
        return schema

    async def _is_listed(self, key: str, index: SchemaIndex) -> bool:
        return index in (await self._locator(key))[0].versions

    def _lost(self, schema_id: str, index: SchemaIndex) -> None:
        """The locator names a ledger that its store does not know: an error, unless that is wanted otherwise (INV16)."""
        ledger_id = index.position.ledger_id
        what = f"version {index.version} of the schema of {schema_id}"
        store = self._resolver.for_ledger(ledger_id, index.position.properties)
        if not self._skip_lost_ledgers:
            raise lost(what, [ledger_id], store) from None
        if ledger_id not in self._given_up:  # the locator goes on naming it, and clients ask all the time
            if len(self._given_up) >= MAX_GIVEN_UP:
                self._given_up.clear()
            self._given_up.add(ledger_id)
            given_up(what, [ledger_id], store, "it is left out")

    async def _discard(self, position: SchemaPosition) -> None:
        try:
            await self._resolver.for_ledger(position.ledger_id, position.properties).delete(position.ledger_id)
        except BraidError as error:
            log.warning("schema ledger %d cannot be deleted before the next start: %s", position.ledger_id, error)


def locator_key(schema_id: str) -> str:
    """Key of a topic's locator record."""
    return f"/schemas/{schema_id}"


def decode_locator(key: str, data: bytes) -> SchemaLocator:
    """JSON to locator; StoreMismatch if it is not one or is newer than this build."""
    try:
        locator = msgspec.json.decode(data, type=SchemaLocator)
    except (msgspec.MsgspecError, ValueError) as exc:
        raise StoreMismatch(f"The record {key} is not readable ({exc}); restore the metadata store.") from exc
    check_version(locator.format_version, key)
    return locator
