"""Checkpoints go from any layout to any other, also through other libraries' formats, with packed weights in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from shardwell.checkpoint.sources import SafetensorsSource
from tests.support.internals import groups_of
from tests.support.packed_models import PLAN, Leg, alone, built, engine_of, run_chain
from tests.support.ranks import Ranks

STEPS = 1  # of each leg: the next one goes on with its moments
PIPE, TENSOR, DATA = Leg(stages=2, zero=1), Leg(tensor=2, zero=3), Leg(zero=2)
BOTH = Leg(stages=2, tensor=2, zero=1)


def through(leg: Leg, kind: str) -> Leg:
    return Leg(leg.stages, leg.tensor, leg.zero, kind)


CHAINS = [
    [PIPE, TENSOR, DATA],
    [DATA, BOTH, PIPE],
    [through(PIPE, "dcp"), TENSOR, through(BOTH, "dcp"), DATA],
    [through(DATA, "dcp"), BOTH],
    [through(TENSOR, "deepspeed"), PIPE, through(BOTH, "deepspeed"), TENSOR],
    [through(PIPE, "hf"), TENSOR, through(TENSOR, "hf"), PIPE],
]


def all_chains(folder: str) -> list[dict[str, Any]]:
    found = []
    for number, chain in enumerate(CHAINS):
        place = Path(folder) / f"chain-{number}"
        place.mkdir(exist_ok=True)
        found.append(run_chain(chain, str(place), STEPS))
    return found


@pytest.mark.slow
def test_six_chains_over_layouts_and_formats_follow_one_process(ranks: Ranks, tmp_path: Path) -> None:
    answers = ranks.run(4, all_chains, str(tmp_path))
    for number, chain in enumerate(CHAINS):
        expected = alone(chain, STEPS)
        held = {name: torch.as_tensor(value) for one in answers for name, value in one[number].items()}
        assert held.keys() == expected.keys()
        for name, value in expected.items():
            assert (held[name] - value).abs().max() < 1e-10, f"chain {number}: {name}"


ROWS = {
    "tokens": "embedding_rowwise",
    "blocks.*.qkv": PLAN["blocks.*.qkv"],
    "blocks.*.gate_up": "packed_colwise",
    "head": "colwise_gather_output",
}


def bytes_read(path: str) -> list[tuple[int, int]]:
    """Load a file of whole tensors at each stage into parts along dim 0; return the bytes read, and held."""
    found = []
    read: list[int] = []
    close = SafetensorsSource.close
    SafetensorsSource.close = lambda self: (read.append(self.bytes_read), close(self))[1]  # type: ignore[method-assign]
    try:
        for stage in (1, 3):
            engine = engine_of(Leg(tensor=2, zero=stage, plan=ROWS), built(3))
            engine.load_model(path)
            spans = [span for group in groups_of(engine) for span in group.spans]
            found.append((read[-1], 8 * sum(piece.numel for span in spans for piece in span.pieces)))
            engine.destroy(whole=False)
    finally:
        SafetensorsSource.close = close  # type: ignore[method-assign]
    return found


def test_a_rank_reads_the_bytes_that_it_holds_of_tensors_cut_along_dim_0(ranks: Ranks, tmp_path: Path) -> None:
    save_file(built(0).state_dict(), tmp_path / "model.safetensors")
    for answers in ranks.run(4, bytes_read, str(tmp_path)):
        for num_read, num_held in answers:
            assert num_read == num_held
