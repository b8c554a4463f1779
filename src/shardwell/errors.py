"""Every error that shardwell raises on purpose.

A message says what was found, where, what was expected and what to do about it.
"""

from __future__ import annotations

import re

# what moves the cursor, changes the colours or the title of a terminal, or turns the direction of what follows
_CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def printable(text: str, *, one_line: bool = False) -> str:
    """Return the text with lone surrogates and control characters as escapes; those of lines stay."""
    text = _CONTROL.sub(_escape, text.encode("utf-8", "backslashreplace").decode())
    return text.replace("\t", "\\t").replace("\n", "\\n") if one_line else text


def _escape(found: re.Match[str]) -> str:
    return "\\0" if found[0] == "\0" else found[0].encode("unicode_escape").decode()


class ShardwellError(RuntimeError):
    """Base of all errors raised by shardwell.

    Names from a model, a configuration or a file may be in the message: what no terminal or log takes is escaped.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(printable(one) if isinstance(one, str) else one for one in args))


class ConfigError(ShardwellError, ValueError):
    """The configuration is wrong; the message names the file, the key and the remedy."""


class ReleasedParameterError(ShardwellError):
    """A parameter's values were needed while its unit was released."""


class ModelChangedError(ShardwellError):
    """The model is no longer the one that was handed to `initialize`."""


class BackwardError(ShardwellError):
    """`backward` was called in a way that cannot give the right gradients."""


class NonFiniteError(ShardwellError):
    """The gradients hold inf or NaN; the step was not applied."""


class DivergenceError(ShardwellError):
    """Ranks are about to run different collectives, or to train different things."""


class NoRoomError(ShardwellError):
    """States do not fit where the configuration stores them; nothing was built."""


class PeerError(ShardwellError):
    """Another rank failed; the message is the first failing rank's own."""


class CheckpointError(ShardwellError):
    """A checkpoint cannot be written or read; the message names file and tensor."""
