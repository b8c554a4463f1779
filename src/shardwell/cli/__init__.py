"""The command line: one file per command; only commands that need torch import it."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from shardwell.cli import (
    calibrate_command,
    checkpoint_command,
    config_command,
    demo_command,
    doctor_command,
    plan_command,
    run_command,
    train_command,
)
from shardwell.cli.examples import Command, Group, epilog
from shardwell.errors import ShardwellError
from shardwell.version import __version__

app = typer.Typer(
    cls=Group,
    name="shardwell",
    help="The Zero Redundancy Optimizer as one engine on PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo", cls=Command, epilog=epilog("demo"))(demo_command.demo)
app.command("run", cls=Command, epilog=epilog("run"), context_settings={"allow_interspersed_args": False})(
    run_command.run
)
app.command("train", cls=Command, epilog=epilog("train"))(train_command.train)
app.command("plan", cls=Command, epilog=epilog("plan"))(plan_command.plan)
app.command("calibrate", cls=Command, epilog=epilog("calibrate"))(calibrate_command.calibrate)
app.command("doctor", cls=Command, epilog=epilog("doctor"))(doctor_command.doctor)
app.command("config", cls=Command, epilog=epilog("config"))(config_command.show)
app.add_typer(checkpoint_command.app, name="checkpoint")


@app.command("version", cls=Command, epilog=epilog("version"))
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def _print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line. An error of shardwell's prints one red line and exits with code 2, without a traceback."""
    try:
        app()
    except ShardwellError as error:
        if os.environ.get("SHARDWELL_DEBUG") == "1":
            raise
        Console(stderr=True).print(Text.assemble(("error: ", "bold red"), (str(error), "red")), soft_wrap=True)
        sys.exit(2)
