"""DeepSpeed's names on shardwell's engine: with this imported, `import deepspeed` gives shardwell.

Import it before the libraries that look for DeepSpeed (Accelerate, Transformers, Lightning, TRL), or start the script
by `shardwell run --as-deepspeed` or `python -m shardwell.compat.deepspeed`. Nothing is installed under its name.
"""

from shardwell.compat.deepspeed_api.hook import switch_on

switch_on()
