"""The `braid` command."""
