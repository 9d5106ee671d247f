"""Deterministic simulation: brokers, stores and clients in one thread, under virtual time, from one seed."""
