"""PySpark data source for Braid; empty until the Spark issue."""
