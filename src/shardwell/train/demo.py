"""The run of `shardwell train --demo`: a new model of a quarter of a million parameters, on a short text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TEXT = Path(__file__).with_name("harbour.txt")


def demo_options() -> dict[str, Any]:
    """Return the options of the demo, which others of the command line replace."""
    return {
        "new_model": {
            "model_type": "llama",
            "hidden_size": 96,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 128,
            "tie_word_embeddings": True,
        },
        "data": [str(TEXT)],
        "eval_data": [str(TEXT)],
        "sequence_length": 96,
        "micro_batch": 4,
        "steps": 240,
        "learning_rate": 4e-3,
        "log_every": 20,
        "prompts": ["The harbour"],
        "sample_tokens": 60,
        "output": "shardwell-train-demo",
        "precision": "fp32",
    }
