"""A rank that answers with what its environment says; what `tests/multinode` starts."""

from __future__ import annotations

import os
import time
from typing import Any

from benchmarks.hosts import answering


def answer(question: dict[str, Any]) -> dict[str, Any]:
    print("noise")
    if question.get("fail") == os.environ["RANK"]:
        raise ValueError("told to")
    if question.get("sleep") == os.environ["RANK"]:
        time.sleep(60)
    return {name: os.environ[name] for name in question["names"]}


if __name__ == "__main__":
    answering(answer)
