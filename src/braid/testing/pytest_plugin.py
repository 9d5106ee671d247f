"""Pytest plug-in of the test kit."""
