"""An example for the help of each command, and the page about it."""

from __future__ import annotations

EXAMPLES: dict[str, tuple[str, str]] = {  # command -> what to type, and the page about it
    "demo": ("shardwell demo --ranks 2 --stages 0,3", "docs/getting-started.md"),
    "run": ("shardwell run -n 2 train.py --epochs 3", "docs/getting-started.md"),
    "train": ("shardwell train --model ./llama --data chats.jsonl --method lora --memory 24GB", "docs/train.md"),
    "plan": ("shardwell plan llama-3-70b --gpus 64 --gpu h100-80gb --nodes 8", "docs/planning.md"),
    "calibrate": ("shardwell calibrate --ranks 2 --out machine.json", "docs/planning.md"),
    "doctor": ("shardwell doctor --disk /mnt/nvme", "docs/getting-started.md"),
    "config": ("shardwell config zero3.json --world-size 8", "docs/configuration.md"),
    "version": ("shardwell version", "README.md"),
    "inspect": ("shardwell checkpoint inspect run", "docs/checkpoints.md"),
    "verify": ("shardwell checkpoint verify run", "docs/checkpoints.md"),
    "export": ("shardwell checkpoint export run model --dtype bf16", "docs/checkpoints.md"),
    "diff": ("shardwell checkpoint diff run/global_step100 run/global_step200", "docs/checkpoints.md"),
    "prune": ("shardwell checkpoint prune run --keep-last 2", "docs/checkpoints.md"),
    "zero-to-fp32": ("shardwell checkpoint zero-to-fp32 run weights", "docs/checkpoints.md"),
    "ds-to-universal": ("shardwell checkpoint ds-to-universal run universal", "docs/checkpoints.md"),
}


def epilog(command: str) -> str:
    """Return the last lines of a command's help."""
    example, page = EXAMPLES[command]
    return f"Example: {example}\n\nMore: {page}"
