"""Rates as the admin API shows them; made where the counters are."""

from __future__ import annotations

from braid.broker.rates import Rates

__all__ = ["Rates"]
