"""The Pulsar protocol without I/O: frames, commands, entries, batches and both ends of a connection. Bytes in, events out."""
