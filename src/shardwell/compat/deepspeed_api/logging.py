"""The logger under DeepSpeed's name, and its functions that speak on chosen ranks only.

The logger has no handler of its own: what it says goes where the user's logging configuration sends it.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwell.compat.deepspeed_api import comm

log_levels = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}


class DeepSpeedLogger(logging.Logger):
    """A logger that can also say a thing once."""

    def warning_once(self, *args: Any) -> None:
        """Log a warning unless the same words were logged before."""
        _once(self, logging.WARNING, *args)

    def log_dist_once(self, message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
        """Log on these ranks, unless the same words were logged before."""
        if (text := get_dist_msg(message, ranks)) is not None:
            _once(self, level, text)


class LoggerFactory:
    """DeepSpeed's name for the function that makes its logger."""

    @staticmethod
    def create_logger(name: str | None = None, level: int = logging.WARNING) -> logging.Logger:
        """Return the logger of this name, at this level."""
        if name is None:
            raise ValueError("create_logger needs a name for the logger")
        made = logging.getLogger(name)
        made.setLevel(level)
        return made


def _make() -> DeepSpeedLogger:
    usual = logging.getLoggerClass()
    logging.setLoggerClass(DeepSpeedLogger)
    try:
        made = logging.getLogger("DeepSpeed")
    finally:
        logging.setLoggerClass(usual)
    if not isinstance(made, DeepSpeedLogger):  # someone asked for this logger before: it keeps its settings
        made.__class__ = DeepSpeedLogger
    assert isinstance(made, DeepSpeedLogger)
    if made.level == logging.NOTSET:
        made.setLevel(logging.WARNING)
    return made


@functools.cache
def _once(to: logging.Logger, level: int, *args: Any) -> None:
    to.log(level, *args)


logger = _make()


def warning_once(*args: Any) -> None:
    """Log a warning unless the same words were logged before."""
    logger.warning_once(*args)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on these ranks, unless the same words were logged before."""
    logger.log_dist_once(message, ranks, level)


def get_dist_msg(message: str, ranks: Sequence[int] | None = None) -> str | None:
    """Return the message with this rank's number if this rank is to say it; [-1] means every rank."""
    if not comm.is_initialized():
        return f"[Rank -1] {message}"
    rank, chosen = comm.get_rank(), list(ranks or ())
    return f"[Rank {rank}] {message}" if chosen and (chosen[0] == -1 or rank in chosen) else None


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log a message on these ranks; [-1] means every rank. Without a process group every process logs it."""
    if (text := get_dist_msg(message, ranks)) is not None:
        logger.log(level, text)


def print_dist(message: str, ranks: Sequence[int] | None = None) -> None:
    """Print a message on these ranks, whatever the level of the logger is."""
    if (text := get_dist_msg(message, ranks)) is not None:
        print(text)


def print_json_dist(message: dict[str, Any], ranks: Sequence[int] | None = None, path: str | None = None) -> None:
    """Write a dictionary as JSON to a file, on these ranks, with the rank in it."""
    if path is not None and get_dist_msg("", ranks) is not None:
        message["rank"] = comm.get_rank() if comm.is_initialized() else -1
        Path(path).write_text(json.dumps(message))


def print_rank_0(message: object, debug: bool = False, force: bool = False) -> None:
    """Log a message on rank 0: with `force` as a warning, else at level INFO; `debug` means every rank."""
    rank = comm.get_rank() if comm.is_initialized() else 0
    if rank == 0 or debug:
        logger.log(logging.WARNING if force else logging.INFO, "[Rank %d] %s", rank, message)


def print_configuration(args: Any, name: str) -> None:
    """Log the attributes of an object, one in each line."""
    logger.info("%s:", name)
    for key, value in sorted(vars(args).items()):
        logger.info("  %-30s %s", key, value)


def get_log_level_from_string(log_level_str: str) -> int:
    """Return the number of a level such as "info"."""
    if log_level_str.lower() not in log_levels:
        raise ValueError(f"{log_level_str!r} is no level of a logger; the levels are {', '.join(log_levels)}")
    return log_levels[log_level_str.lower()]


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level of a logger and of its handlers; by default of this one."""
    level, chosen = get_log_level_from_string(log_level_str), custom_logger or logger
    chosen.setLevel(level)
    for handler in chosen.handlers:
        handler.setLevel(level)


def get_current_level() -> int:
    """Return the level of the logger."""
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str: str) -> bool:
    """Tell whether the logger is at this level or a more talkative one."""
    if not isinstance(max_log_level_str, str):
        raise ValueError(f"should_log_le takes the name of a level, such as 'info', not {max_log_level_str!r}")
    return get_current_level() <= get_log_level_from_string(max_log_level_str)
