"""Shipped test kit: in-process brokers and a pytest fixture, a manual clock, file twins, conformance suites."""
