"""Values and pure algebra: names, hashing, positions, acknowledged ranges. No I/O, no clock, no dependency but `errors`."""
