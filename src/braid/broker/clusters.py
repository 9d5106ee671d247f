"""Records of clusters: the own one, and others an administrator has named.

Owns `/admin/clusters`. Braid does not replicate between clusters yet; the records are kept so that tools find what they wrote,
and so that policies can only name clusters that exist. The own cluster cannot be deleted.
"""

from __future__ import annotations

from typing import Any

import msgspec

from braid.errors import AlreadyExists, InvalidArgument, NotFound, VersionConflict
from braid.metadata.api import ABSENT, MetadataStore
from braid.metadata.values import read_json
from braid.model.names import encode

Json = dict[str, Any]
FORMAT_VERSION = 1
_ROOT = "/admin/clusters"


class Clusters:
    """Reads and writes cluster records; `own` is the cluster this broker belongs to."""

    def __init__(self, store: MetadataStore, own: str) -> None:
        self._store = store
        self.own = own

    async def get(self, cluster: str) -> Json:
        """What was stored of a cluster; empty for one that was made by a broker's start."""
        record = await self._store.get(_key(cluster))
        if record is None:
            raise NotFound(f"The cluster {cluster} does not exist.")
        values = read_json(Json, record.key, record.value)
        values.pop("formatVersion", None)
        return values

    async def create(self, cluster: str, data: Json) -> None:
        try:
            await self._store.put(_key(cluster), _encode(data), expected=ABSENT)
        except VersionConflict:
            raise AlreadyExists(f"The cluster {cluster} already exists.") from None

    async def update(self, cluster: str, data: Json) -> None:
        await self.get(cluster)
        await self._store.put(_key(cluster), _encode(data))

    async def delete(self, cluster: str) -> None:
        if cluster == self.own:
            raise InvalidArgument(f"{cluster} is the cluster of this broker; it cannot be deleted.")
        if not await self._store.delete(_key(cluster)):
            raise NotFound(f"The cluster {cluster} does not exist.")


def _key(cluster: str) -> str:
    return f"{_ROOT}/{encode(cluster)}"


def _encode(data: Json) -> bytes:
    return msgspec.json.encode({**data, "formatVersion": FORMAT_VERSION})
