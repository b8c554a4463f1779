"""`deepspeed.add_config_arguments`: the options of a script that name its configuration."""

from __future__ import annotations

import argparse


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed`, `--deepspeed_config` and their old names to a parser, and return it."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed's configuration, which shardwell reads")
    group.add_argument("--deepspeed", action="store_true", help="for the script itself; nothing here reads it")
    group.add_argument("--deepspeed_config", type=str, help="JSON file with the configuration")
    group.add_argument("--deepscale", action="store_true", help="old name of --deepspeed")
    group.add_argument("--deepscale_config", type=str, help="old name of --deepspeed_config")
    return parser


def config_of(args: object) -> str | None:
    """Return the configuration that parsed arguments name, also by its old name."""
    for name in ("deepspeed_config", "deepscale_config"):
        if (found := getattr(args, name, None)) is not None:
            return str(found)
    return None
