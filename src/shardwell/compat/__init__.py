"""Other libraries' names for what shardwell does. This package knows the public API and no engine internals."""
