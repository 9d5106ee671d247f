"""The hash of many keys at once is the SDK's."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from braid.model.hashing import murmur3_x86_32
from braid_spark.hashing import murmur3


@given(st.lists(st.binary(max_size=40)))
def test_hashes_are_those_of_the_sdk(keys: list[bytes]) -> None:
    data = np.frombuffer(b"".join(keys), np.uint8)
    lengths = np.array([len(key) for key in keys], np.int64)
    starts = np.cumsum(lengths) - lengths
    assert murmur3(data, starts, lengths).tolist() == [murmur3_x86_32(key) for key in keys]
