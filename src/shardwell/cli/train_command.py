"""`shardwell train`: trains a causal language model as a recipe says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwell.cli.failures import Restarts, exit_like_ranks
from shardwell.cli.launch import LaunchTopology, launch
from shardwell.errors import ConfigError

_Paths = list[str] | None


def train(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="[RECIPE]", help="A YAML or JSON file of options.", show_default=False)
    ] = None,
    model: Annotated[str | None, typer.Option(help="Folder of a Hugging Face model to start from.")] = None,
    new_model: Annotated[str | None, typer.Option(help="config.json of a new model to pre-train.")] = None,
    data: Annotated[_Paths, typer.Option(help="Text, .jsonl, .json or .parquet; a file or folder. Repeat it.")] = None,
    eval_data: Annotated[_Paths, typer.Option(help="Files to evaluate on.")] = None,
    method: Annotated[str | None, typer.Option(help="full or lora.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps; without it, one epoch.")] = None,
    sequence_length: Annotated[int | None, typer.Option(help="Tokens in a row.")] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Rows of a rank in one forward.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Highest learning rate.")] = None,
    config: Annotated[str | None, typer.Option(help="shardwell's JSON configuration.")] = None,
    memory: Annotated[str | None, typer.Option(help="Of each device, such as 24GB: chooses stage and offload.")] = None,
    nvme_path: Annotated[str | None, typer.Option(help="Folder on an NVMe disk that --memory may choose.")] = None,
    output: Annotated[str | None, typer.Option(help="Folder for checkpoints and the exported model.")] = None,
    prompt: Annotated[_Paths, typer.Option(help="Print what the model writes after this. Repeat it.")] = None,
    options: Annotated[
        _Paths, typer.Option("--set", metavar="OPTION=VALUE", help="Any option of a recipe. Repeat it.")
    ] = None,
    num_ranks: Annotated[
        int | None, typer.Option("-n", "--ranks", min=1, help="Ranks on this node; one per GPU, or one.")
    ] = None,
    max_restarts: Annotated[int, typer.Option(min=0, help="How often ranks are started again after a failure.")] = 0,
    demo: Annotated[bool, typer.Option("--demo", help="Train a tiny model on a text that comes along.")] = False,
    print_recipe: Annotated[bool, typer.Option("--print-recipe", help="Print all options as YAML, and end.")] = False,
) -> None:
    """Fine-tune, adapt (LoRA) or pre-train a causal language model; a run that was ended goes on where it was.

    shardwell train --demo

    shardwell train --model ./llama --data chats.jsonl --method lora --memory 24GB
    """
    from shardwell.train.demo import demo_options
    from shardwell.train.recipe import Recipe, as_yaml, read_recipe

    given: dict[str, Any] = {
        "model": model,
        "new_model": new_model,
        "data": data or None,
        "eval_data": eval_data or None,
        "method": method,
        "steps": steps,
        "sequence_length": sequence_length,
        "micro_batch": micro_batch,
        "learning_rate": learning_rate,
        "config": config,
        "memory": memory,
        "nvme_path": nvme_path,
        "output": output,
        "prompts": prompt or None,
        **dict(map(_option, options or [])),
    }
    given = {name: value for name, value in given.items() if value is not None}
    if demo:
        given = {**demo_options(), **given}
    if print_recipe and recipe is None and not given:
        typer.echo(as_yaml(Recipe()), nl=False)
        return
    found = read_recipe(None if recipe is None else str(recipe), given)
    if print_recipe:
        typer.echo(as_yaml(found), nl=False)
        return
    ranks = num_ranks or (2 if demo else _one_per_gpu())
    with exit_like_ranks(runs_own_code=True, then=lambda: _way_on(Path(found.output))):
        launch(
            ["-m", "shardwell.train.rank", json.dumps(found.to_dict())],
            LaunchTopology(ranks),
            Restarts(max_restarts, None, 30.0),
        )


def _option(text: str) -> tuple[str, Any]:
    """Return the name and the value of `name=value`; the value is JSON, or else text."""
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise ConfigError(f"--set {text}: expected an option and its value, such as --set clip=0.5")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _way_on(output: Path) -> str:
    """Return what a person who has interrupted a run can do."""
    if any(output.glob("checkpoints/*/manifest.json")):
        return f". The same command goes on from the last checkpoint in {output}."
    return ". No checkpoint was saved yet; --set save_every=N saves every N steps."


def _one_per_gpu() -> int:
    from shardwell.memory.local_gpus import num_gpus

    return max(1, num_gpus())
