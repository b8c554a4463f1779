"""Where all-gathers cannot take turns on two communicators, the log says so."""

from __future__ import annotations

import logging

import pytest
import torch

import shardwell
from tests.support.models import Gpt, zero


@pytest.mark.parametrize("asks", [False, True])
def test_turns_without_a_second_communicator_are_reported(caplog: pytest.LogCaptureFixture, asks: bool) -> None:
    model = Gpt()
    config = zero(3, shardwell={"gathers_take_turns": asks})
    with caplog.at_level(logging.WARNING, "shardwell"):
        shardwell.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
    told = [line for line in caplog.messages if "gathers_take_turns" in line]
    assert told == ["shardwell.gathers_take_turns has no effect: only several NCCL ranks have two communicators"] * asks
