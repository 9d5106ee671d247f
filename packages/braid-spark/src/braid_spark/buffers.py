"""Between numpy and Arrow by buffers: short arrays and single values, and back.

pyarrow imports pandas, where it is installed, the first time it is given a Python or numpy value to make an array or a scalar
of, or makes a numpy array with a copy: half a second of each process that Spark starts. What every task needs is therefore made
here. Pure.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


def positions(rows: NDArray[np.signedinteger]) -> pa.Array:
    """Numbers of rows to take."""
    numbers = np.ascontiguousarray(rows, np.int64)
    return pa.Array.from_buffers(pa.int64(), len(numbers), [None, pa.py_buffer(numbers)], 0)


def bytes_value(value: bytes, type_: pa.DataType) -> pa.Scalar:
    """These bytes as a binary, or as a string, which they must be in UTF-8."""
    ends = np.array([0, len(value)], np.int32)
    return pa.Array.from_buffers(type_, 1, [None, pa.py_buffer(ends), pa.py_buffer(value)], 0)[0]


def number_value(value: int) -> pa.Scalar:
    """A number of 64 bits."""
    return positions(np.array([value]))[0]


def numbers_of(column: pa.Array) -> NDArray[np.int64]:
    """The numbers of 64 bits in a column without nulls."""
    if not len(column):
        return np.zeros(0, np.int64)
    return np.frombuffer(column.buffers()[1], np.int64, len(column), column.offset * 8)


def nulls_of(column: pa.Array) -> NDArray[np.bool_]:
    """Where a column is null."""
    found = column.is_null()
    bits = np.frombuffer(found.buffers()[1], np.uint8) if len(found) else np.zeros(0, np.uint8)
    return np.unpackbits(bits, bitorder="little")[found.offset : found.offset + len(found)].view(np.bool_)
