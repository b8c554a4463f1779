"""DeepSpeed's names on shardwell's engine."""
