"""The view as it is stored: whole in one version of a term, and then only as differences, each in its own version.

    opt.view of 7.t   p of 8.t   p of 9.t   p of 10.t        make the view of version 10, whose manifest says 7

A term begins with a whole view, and stores it again once the differences since then take as many bytes. So all names of
a chain follow from the last one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvps.arrays.digest import view
from kvps.arrays.formats import Format
from kvps.arrays.layout import CHUNK_BYTES, CHUNK_ITEMS, DTYPE, Array, Layout
from kvps.arrays.weight_view import VIEW, follow
from kvps.connection.client import Client
from kvps.connection.sockets import ChunkGone
from kvps.errors import CorruptData
from kvps.parsing import Fields
from kvps.protocol.keys import JobKeys, chain

_MOST = 64  # differences, each of which is a request for every chunk


def most_differences(format: Format) -> int:
    """Return how many differences take as many bytes as a whole view."""
    return max(1, min(_MOST, round(CHUNK_BYTES / format.nbytes(CHUNK_ITEMS))))


class StoredView:
    """The reader of whole views of one job, whose workers pull differences in `format`."""

    def __init__(self, client: Client, keys: JobKeys, layout: Layout, format: Format) -> None:
        self._client = client
        self._keys = keys
        self._layout = layout
        self._format = format

    def begins(self, names: Sequence[tuple[int, str]]) -> list[int]:
        """Return for each shard and staged name the version whose view is stored whole. Raises ChunkGone, CorruptData.

        Version 0 has no manifest, and that of a restored job's first version says nothing: they have whole views.
        """
        texts = self._client.gather([("GET", self._keys.manifest(shard, name)) for shard, name in names])
        out = []
        for (_, name), text in zip(names, texts, strict=True):
            version = int(name.partition(".")[0])
            if not text and version:
                raise ChunkGone("a manifest is gone")
            least = max(0, version - most_differences(self._format))
            out.append(Fields.of_json(text, "a manifest").whole("view", least, version, version) if text else 0)
        return out

    def read(self, names: Mapping[int, str], flat: Array, low: int = 0) -> None:
        """Read the view of shards, by their staged names, into `flat`, whose first item is item `low` of the layout.

        Raises ChunkGone, CorruptData.
        """
        begun, sent, targets = [], [], []
        for (shard, name), first in zip(names.items(), self.begins(list(names.items())), strict=True):
            links = chain(name, first)
            for c in self._layout.chunks[shard]:
                values = flat[c.start - low : c.stop - low]
                begun.append((self._keys.state(shard, VIEW, links[0], c.number), view(values)))
                for link in links[1:]:
                    targets.append((values, np.empty(self._format.nbytes(values.size), np.uint8)))
                    sent.append((self._keys.pulled(shard, link, c.number), targets[-1][1].data))
        self._client.get(begun)
        scratch: Array = np.empty(min(flat.size, CHUNK_ITEMS), DTYPE)
        try:
            for (values, difference), _ in zip(targets, self._client.getting(sent), strict=True):
                follow(self._format, difference, values, values, scratch[: values.size])
        except ValueError as error:
            raise damaged(self._keys, error) from None


def damaged(keys: JobKeys, error: ValueError) -> CorruptData:
    """Return the error that a difference was not what an aggregator wrote."""
    return CorruptData(f"job {keys.job!r}: {error}; something else wrote what workers pull, under {keys.slot(0)}p:…")
