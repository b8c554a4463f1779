"""Benchmarks of shardwell against its peers, each a module that runs with ``python -m benchmarks.NAME``."""
