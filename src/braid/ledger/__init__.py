"""Ledgers: append-only, fenced, closed once: what a bookie cluster does, behind `LedgerStore`."""
