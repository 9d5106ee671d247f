"""Transactions decided by one compare-and-swap: coordinator, transaction buffer, pending acknowledgments, sweeps."""
