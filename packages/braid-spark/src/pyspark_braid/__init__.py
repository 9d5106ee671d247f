"""Found by PySpark on its own; will register the data source `braid`."""
