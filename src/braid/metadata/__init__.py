"""Versioned records with compare-and-swap, ephemerals, indexes, sequences and watches, over exchangeable backends."""
