"""What the help of each command shows: an example, the page about it, and options without the names of types."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

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


class Command(TyperCommand):
    """A command whose help is for people."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        _without_types(self.get_params(ctx), ctx)
        super().format_help(ctx, formatter)


class Group(TyperGroup):
    """A group of commands whose help is for people."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        _without_types(self.get_params(ctx), ctx)
        super().format_help(ctx, formatter)


def _without_types(parameters: list[Any], ctx: Any) -> None:
    """Let the help show a flag by its name alone, and N, PATH, TEXT or the choices for a value.

    What is changed here has no effect but on the help, after which the process ends. A typer that shows types
    otherwise keeps to it.
    """
    for one in parameters:
        if hasattr(one, "display_type"):
            shown = _shown_for(one.display_type(ctx).strip("<>"))
            one.metavar = shown if one.metavar is None and one.param_type_name == "option" else one.metavar
            if one.param_type_name == "argument":
                one.display_type_rich = lambda ctx: ""  # it has a name
            one.min = one.max = None  # what is out of range is an error that says so


def _shown_for(kind: str) -> str:
    """Return what stands for a value of this type."""
    if kind == "bool" or "|" in kind:
        return "" if kind == "bool" else kind
    return "N" if kind.startswith(("int", "float")) else "PATH" if kind in ("path", "file", "directory") else "TEXT"
