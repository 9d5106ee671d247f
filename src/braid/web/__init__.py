"""The broker's HTTP side (admin REST, metrics) and `Standalone`, the composition of a whole one-process broker."""
