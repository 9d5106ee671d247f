"""The protocol's messages: `pulsar.proto` and what protoc makes of it (see `generate`). Only `braid.wire` imports this."""
