"""Variables of a launcher that cannot be are an error at once, and no wait for ranks that never come."""

from __future__ import annotations

import pytest
import torch

from shardwell.errors import ShardwellError
from shardwell.parallel import start_process_group

COMPLETE = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"RANK": "2"}, "RANK=2, WORLD_SIZE=2 .*ranks count from 0 to one below WORLD_SIZE"),
        ({"RANK": "-1"}, "ranks count from 0"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two': expected a number"),
        ({"MASTER_PORT": "99999"}, "ports end at 65535"),
        ({"MASTER_ADDR": None, "MASTER_PORT": None}, "RANK=0 and no MASTER_ADDR and MASTER_PORT"),
        ({"RANK": None}, "WORLD_SIZE=2 and no RANK: each process would train alone"),
    ],
)
def test_an_environment_that_cannot_be_is_refused(
    changes: dict[str, str | None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**COMPLETE, **changes}.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    with pytest.raises(ShardwellError, match=words):
        start_process_group(torch.device("cpu"))


def test_a_process_without_a_launcher_stays_single(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in COMPLETE:
        monkeypatch.delenv(name, raising=False)
    assert not start_process_group(torch.device("cpu"))


def test_a_port_without_a_rank_is_of_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes names the address of a service called "master" so."""
    for name in COMPLETE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_PORT", "tcp://10.0.0.1:443")
    assert not start_process_group(torch.device("cpu"))
