"""DeepSpeed's API over shardwell's: what `import deepspeed` gives once `shardwell.compat.deepspeed` was imported.

Importing this package or its modules changes nothing; `hook.switch_on` does.
"""
