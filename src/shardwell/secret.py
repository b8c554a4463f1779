"""The secret of a job: what its own processes know and strangers do not.

    SHARDWELL_SECRET        the secret itself
    SHARDWELL_SECRET_FILE   a file with it, which only its owner may read

It is never an argument of a command, because those are shown to every user of the machine. Knows no torch.
"""

from __future__ import annotations

import hmac
import os
import stat
from collections.abc import Mapping

from shardwell.errors import ShardwellError

VARIABLE = "SHARDWELL_SECRET"
FILE_VARIABLE = "SHARDWELL_SECRET_FILE"
_SHORTEST = 16  # characters; shorter ones can be tried through
_LONGEST = 4096  # bytes of the file
HOW_TO = (
    f"make one with `(umask 077; openssl rand -hex 32 > FILE)`, give the same file to every node, and name it in "
    f"{FILE_VARIABLE}; or put the secret into {VARIABLE}"
)


def job_secret(environ: Mapping[str, str] | None = None) -> bytes | None:
    """Return the secret in the environment; None if there is none."""
    found = os.environ if environ is None else environ
    text, path = found.get(VARIABLE, ""), found.get(FILE_VARIABLE, "")
    if text and path:
        raise ShardwellError(f"{VARIABLE} and {FILE_VARIABLE} are both set; keep one of them")
    if path:
        return _checked(_read(path), f"{FILE_VARIABLE}={path}")
    return _checked(text.strip().encode("utf-8", "surrogateescape"), VARIABLE) if text else None


def derived(secret: bytes, purpose: str) -> bytes:
    """Return a key for one purpose; what is signed for one cannot be passed off for another."""
    return hmac.digest(secret, f"shardwell {purpose}".encode(), "sha256")


def _checked(secret: bytes, where: str) -> bytes:
    if len(secret) < _SHORTEST:
        raise ShardwellError(f"{where}: a secret has at least {_SHORTEST} characters; {HOW_TO}")
    return secret


def _read(path: str) -> bytes:
    where = f"{FILE_VARIABLE}={path}"
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # the last: a FIFO would wait
    except (OSError, ValueError) as error:
        raise ShardwellError(f"{where}: cannot be read ({error})") from None
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise ShardwellError(f"{where}: is not a regular file")
        if status.st_mode & 0o077 or status.st_uid not in (os.geteuid(), 0):
            raise ShardwellError(
                f"{where}: others may read or change it (mode {stat.S_IMODE(status.st_mode):04o}, owner "
                f"{status.st_uid}); `chmod 600` it"
            )
        return os.read(handle, _LONGEST).strip()
    finally:
        os.close(handle)
