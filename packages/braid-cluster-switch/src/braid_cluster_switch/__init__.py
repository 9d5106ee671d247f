"""Storage-cluster switching plug-in; empty until its issue."""
