"""Braid: a message-streaming platform whose topics grow and shrink while they are in use."""

__version__ = "0.1.0"
