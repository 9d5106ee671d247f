"""The broker: connections, command handlers, topics, subscriptions and dispatchers."""
