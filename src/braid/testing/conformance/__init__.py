"""Suites that every backend of a port must pass, for our own backends and for those of others."""
