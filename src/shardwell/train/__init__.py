"""`shardwell train`: fine-tuning, LoRA and pre-training of causal language models from the shell.

It is built on what every user can import, and meant to be read as an example: `recipe.py` has the options,
`documents.py` and `rows.py` make rows of tokens from files, `models.py` builds the model, `memory_choice.py` chooses
the stage, `rank.py` is the loop.
"""
