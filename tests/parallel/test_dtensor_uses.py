"""What an engine does with models that come as DTensors, beside training them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwell
from tests.support import pipelines
from tests.support.dtensor_models import cut_by_torch, engine_over, line_of_ranks, train_cut
from tests.support.models import batches, zero
from tests.support.ranks import Ranks
from tests.support.tensor_models import ROWS, TensorCase, plainly, started, train
from tests.support.training import distance

HOST = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}}
CASES = [TensorCase(accumulation=2, config={"shardwell": {"divergence_timeout": 100}}, model={"frozen": True})]


def in_all_uses(folder: str) -> dict[str, Any]:
    """Train and save as DTensors, load as DTensors and with a plan; return whole models."""
    case, found = TensorCase(model={"blocks": 1}, steps=2), dict[str, Any]()
    found["uses"] = []
    for one in CASES:
        engine = engine_over(cut_by_torch(one, "plain"), one, 3)
        train_cut(engine, one)
        found["uses"].append(_plain_names(engine.state_dict()))
        engine.destroy()
    engine = engine_over(cut_by_torch(case, "plain").inner, case, 3)
    train(engine, case)
    engine.save_checkpoint(folder)
    found["saved"] = engine.state_dict()
    with pytest.raises(shardwell.ShardwellError, match="compile"):
        engine.compile()
    engine.destroy()
    again = engine_over(cut_by_torch(case, "plain", seed=5).inner, case, 1)
    again.load_checkpoint(folder)
    found["as DTensors"] = again.state_dict()
    again.destroy()
    planned, _ = started(case, 2)
    planned.load_checkpoint(folder)
    found["with a plan"] = planned.state_dict()
    planned.destroy()
    return found


def _plain_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("inner."): value for name, value in state.items()}


@pytest.mark.slow
def test_checkpoints_accumulation_and_frozen_layers(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks.run(4, in_all_uses, str(tmp_path))[::3]:
        for case, values in zip(CASES, found["uses"], strict=True):
            difference, name = distance(values, plainly(case))
            assert difference < 1e-10, f"{case}: {name} differs by {difference}"
        for way in ("as DTensors", "with a plan"):
            assert all((found[way][name] == value).all() for name, value in found["saved"].items()), way
        assert distance(found["saved"], plainly(TensorCase(model={"blocks": 1}, steps=2)))[0] < 1e-10


class Tied(nn.Module):
    """An embedding that is the output layer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(29, 16), nn.Linear(16, 29, bias=False)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.mlp(self.embed(tokens[:, :-1])))
        return nn.functional.cross_entropy(logits.flatten(0, 1).double(), tokens[:, 1:].flatten())


def tied(stage: int, dtype: torch.dtype, config: dict[str, Any]) -> dict[str, Tensor]:
    """Train a model whose tied weight is one DTensor, on ranks whose tensor axis is the outer one."""
    torch.manual_seed(0)
    model = Tied().to(dtype)
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("tp", "dp"))["tp"]
    styles = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
        "mlp.0": ColwiseParallel(),
        "mlp.2": RowwiseParallel(),
    }
    parallelize_module(model, mesh, styles)
    model.head.weight = model.embed.weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings = {**zero(stage, gradient_clipping=0.1), **config}
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=settings).engine
    for batch in batches(4, ROWS):
        engine.backward(engine(batch.chunk(engine.data_size)[engine.data_rank]))
        engine.step()
    assert model.head.weight is model.embed.weight
    found = engine.state_dict()
    engine.destroy()
    assert isinstance(model.head.weight, DTensor)
    assert model.head.weight is model.embed.weight
    return found


def tied_alone() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Tied().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in batches(4, ROWS):
        optimizer.zero_grad()
        model(batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


def tied_in_all_ways() -> list[dict[str, Tensor]]:
    half = {"bf16": {"enabled": True}}
    return [
        tied(3, torch.float64, {}),
        tied(3, torch.float64, HOST),
        *(tied(stage, torch.float32, half) for stage in (1, 2, 3)),
    ]


@pytest.mark.slow
def test_one_tied_dtensor_on_an_outer_axis_with_offload_and_in_bf16(ranks: Ranks) -> None:
    expected = tied_alone()
    for plain, offloaded, *halves in ranks.run(4, tied_in_all_ways)[::3]:
        assert distance(plain, expected)[0] < 1e-10
        assert distance(offloaded, expected)[0] < 1e-10
        for half in halves[1:]:  # the same bits at stages 1 to 3
            assert all((half[name] == value).all() for name, value in halves[0].items())
        assert 0.0 < distance({n: v.astype("float64") for n, v in halves[0].items()}, expected)[0] < 0.05


def misfits() -> list[str]:
    """Hand over models that do not fit; return the errors."""
    over_all = {"mesh": init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))}
    words = []
    for axes, config in ((over_all, zero(1)), ({}, zero(1, tensor_parallel={"autotp_size": 4}))):
        model = Tied()
        parallelize_module(model.mlp, line_of_ranks(), {"0": ColwiseParallel(), "2": RowwiseParallel()})
        with pytest.raises(shardwell.ShardwellError) as caught:
            shardwell.initialize(model=model, config=config, **axes)
        words.append(str(caught.value))
    return words


def test_a_mesh_or_a_configuration_that_contradicts_the_model_is_an_error(ranks: Ranks) -> None:
    for mesh, config in ranks.run(4, misfits):
        assert "the model is cut over ranks [" in mesh
        assert "mesh that the model was cut over" in mesh
        assert "tensor_parallel.autotp_size: 4 contradicts" in config


def in_a_pipeline() -> list[dict[str, Any]]:
    """Train a tied model that torch has cut, in a pipeline of two stages."""
    found = []
    for schedule in ("1f1b", "zb-h1"):
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "tp"))
        torch.manual_seed(0)
        model = pipelines.Decoder(tied=True).double()
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        split = shardwell.pipeline.split(model, loss_fn=pipelines.next_token_loss)
        config = pipelines.pipeline_config(1, schedule)
        engine: Any = shardwell.initialize(model=split, config=config, mesh=mesh).engine
        batches = pipelines.stream(3, engine.data_rank)
        for _ in range(3):
            engine.train_batch(batches)
        found.append(engine.state_dict())
        engine.destroy(whole=False)
    return found


@pytest.mark.slow
def test_dtensors_in_a_pipeline_follow_one_process(ranks: Ranks) -> None:
    torch.manual_seed(0)
    expected = pipelines.plain(pipelines.Decoder(tied=True).double(), 3, data_size=1)["parameters"]
    for answers in ranks.run(4, in_a_pipeline):
        for found in answers:
            for name in found.keys() & expected.keys():
                assert (torch.as_tensor(found[name]) - expected[name]).abs().max() < 1e-10, name
