"""Models of all kinds train in a pipeline: Transformers' decoders, PipelineModules, in mixed precision, recomputed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import shardwell
from shardwell.compat.deepspeed_api.topology import ProcessTopology
from shardwell.errors import ConfigError, ShardwellError
from shardwell.pipeline import LayerSpec, PipelineModule, TiedLayerSpec
from tests.support.pipelines import (
    NUM_MICRO_BATCHES,
    VOCABULARY,
    WIDTH,
    Block,
    Decoder,
    chain,
    micro_batches,
    next_token_loss,
    pipeline_config,
    stream,
)
from tests.support.ranks import Ranks

STEPS = 3
SMALL = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
HEADS = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2}
DECODERS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **HEADS, num_key_value_heads=1)),
    "qwen3, tied": lambda: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**SMALL, **HEADS, num_key_value_heads=1, head_dim=8, tie_word_embeddings=True)
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**SMALL, n_embd=16, n_layer=4, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    ),
    # Blocks that return tuples, and a norm that is registered before the blocks.
    "bloom": lambda: transformers.BloomForCausalLM(
        transformers.BloomConfig(**SMALL, hidden_size=16, n_layer=4, n_head=2)
    ),
    "opt": lambda: transformers.OPTForCausalLM(
        transformers.OPTConfig(**SMALL, **HEADS, ffn_dim=24, word_embed_proj_dim=16, dropout=0)
    ),
}


def made(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build().double()


def dictionaries(steps: int, data_rank: int) -> Iterator[dict[str, Tensor]]:
    """Yield micro-batches as Transformers has them, with padding."""
    for ids, _ in stream(steps, data_rank):
        mask = torch.ones_like(ids)
        mask[0, -1] = 0
        yield {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def plain_losses(
    model: nn.Module, loss_of: Callable[[nn.Module, Any], Tensor], rows: Any, data_size: int
) -> list[float]:
    """Return the losses of plain PyTorch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    iterators = [rows(STEPS, rank) for rank in range(data_size)]
    losses = []
    for _ in range(STEPS):
        batches = [next(one) for one in iterators for _ in range(NUM_MICRO_BATCHES)]
        found = torch.stack([loss_of(model, batch) for batch in batches]).mean()
        found.backward()
        losses.append(float(found.detach()))
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train_decoders() -> dict[str, list[float]]:
    """Train each decoder of Transformers, whose own loss counts; the model is not split by hand."""
    found = {}
    for number, (name, build) in enumerate(DECODERS.items()):
        block = {
            "stages": 2,
            "schedule": "zb-h1" if number == 1 else "1f1b",
            "activation_checkpoint_interval": number % 2,
        }
        model = made(build)
        engine, *_ = shardwell.initialize(
            model=model, config={**pipeline_config(3 - number % 3, "1f1b"), "pipeline": block}
        )
        rows = dictionaries(STEPS, engine.data_rank)
        found[name] = [float(engine.train_batch(rows)) for _ in range(STEPS)]
        engine.destroy(whole=False)
    return found


@pytest.mark.slow
def test_decoders_of_transformers_train_without_edits(ranks: Ranks) -> None:
    expected = {
        name: plain_losses(made(build), lambda model, batch: model(**batch, use_cache=False).loss, dictionaries, 1)
        for name, build in DECODERS.items()
    }
    for found in ranks.run(2, train_decoders):
        for name, losses in expected.items():
            assert found[name] == pytest.approx(losses, abs=1e-6), name  # their loss is computed in fp32


def called_by_hand(folder: str) -> list[str]:
    """Use one stage as if it were the model; return the words."""
    model: Any = made(next(iter(DECODERS.values())))
    engine, *_ = shardwell.initialize(model=model, config=pipeline_config(1, "1f1b"))
    batch = next(dictionaries(1, engine.data_rank))
    words = []
    for use in (lambda: model(**batch), lambda: model.save_pretrained(folder)):
        with pytest.raises(ShardwellError) as refused:
            use()
        words.append(str(refused.value))
    engine.destroy(whole=False)
    return words


class Learned(nn.Module):
    """A loss with a temperature that is trained."""

    def __init__(self, is_frozen: bool) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()), requires_grad=not is_frozen)

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return next_token_loss(logits * self.temperature, labels)


def with_learned_loss() -> str:
    model = shardwell.pipeline.split(chain(2), loss_fn=Learned(is_frozen=True))
    shardwell.initialize(model=model, config=pipeline_config(1, "1f1b")).engine.destroy(whole=False)
    try:
        shardwell.initialize(
            model=shardwell.pipeline.split(chain(2), loss_fn=Learned(is_frozen=False)),
            config=pipeline_config(1, "1f1b"),
        )
    except ShardwellError as error:  # its own, or that of the rank that was refused first
        return str(error)
    return "nothing was refused"


def test_a_loss_with_parameters_of_its_own_is_refused(ranks: Ranks) -> None:
    for words in ranks.run(2, with_learned_loss):
        assert "loss_fn is a Learned with parameters of its own ('temperature')" in words


def test_a_stage_is_neither_called_nor_saved_as_the_model(ranks: Ranks, tmp_path: Path) -> None:
    for called, saved in ranks.run(2, called_by_hand, str(tmp_path)):
        assert "this rank has one stage of it: call engine.train_batch(iterator)" in called
        assert "save_pretrained would write the layers of this rank's pipeline stage only" in saved


class Embedding(nn.Embedding):
    """An embedding that is the output layer as well."""


def output_layer(embedding: Embedding, hidden: Tensor) -> Tensor:
    return F.linear(hidden, embedding.weight)


def halve(hidden: Tensor) -> Tensor:
    return hidden * 0.5


SPECS = [
    TiedLayerSpec("embed", Embedding, VOCABULARY, WIDTH, dtype=torch.float64),
    *(LayerSpec(lambda: Block().double()) for _ in range(3)),
    halve,
    LayerSpec(nn.LayerNorm, WIDTH, dtype=torch.float64),
    TiedLayerSpec("embed", Embedding, VOCABULARY, WIDTH, forward_fn=output_layer, dtype=torch.float64),
]


def train_specs(num_stages: int) -> tuple[list[float], list[str]]:
    """Train a PipelineModule; return the losses and the names of this rank's parameters."""
    net = PipelineModule(
        SPECS, num_stages=num_stages, loss_fn=next_token_loss, seed_layers=True, partition_method="uniform"
    )
    config = {key: value for key, value in pipeline_config(1, "1f1b").items() if key != "pipeline"}
    if num_stages == 1:
        config["gradient_accumulation_steps"] *= 2
    engine, *_ = shardwell.initialize(model=net, model_parameters=list(net.parameters()), config=config)
    if num_stages == 1:
        batches = iter([batch for step in range(STEPS) for rank in range(2) for batch in micro_batches(step, rank)])
    else:
        batches = stream(STEPS, engine.data_rank)
    losses = [float(engine.train_batch(batches)) for _ in range(STEPS)]
    return losses, [name for name, _ in engine.module.named_parameters()]


def test_layer_specs_are_built_where_they_run(ranks: Ranks) -> None:
    ((expected, every),) = ranks.run(1, train_specs, 1)
    found = ranks.run(4, train_specs, 2)
    assert all(losses == pytest.approx(expected, abs=1e-10) for losses, _ in found)
    assert found[0][1] == found[1][1] != found[2][1]
    assert set(found[0][1]) | set(found[2][1]) == set(every)
    assert set(found[0][1]) & set(found[2][1]) == {"tied_modules.embed.weight"}


def laid_out_otherwise() -> list[str]:
    """Let the pipeline be the inner axis: of the topology, and of the mesh."""
    with pytest.raises(ConfigError) as topology:
        PipelineModule(SPECS, topology=ProcessTopology(["data", "pipe"], [2, 2]), loss_fn=next_token_loss)
    net = PipelineModule(SPECS, num_stages=2, loss_fn=next_token_loss)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    with pytest.raises(ConfigError) as turned:
        shardwell.initialize(model=net, config=pipeline_config(1, "1f1b"), mesh=mesh)
    return [str(topology.value), str(turned.value)]


def test_a_pipeline_module_is_refused_where_ranks_are_laid_out_otherwise(ranks: Ranks) -> None:
    """Ranks 1 and 2 would run layers that they have not built, or read rows that are not theirs."""
    for topology, mesh in ranks.run(4, laid_out_otherwise):
        assert "2 (data) x 2 (pipe) is not the layout of 4 rank(s) in 2 stages" in topology
        assert "rank 2 has stage 0 by the mesh or mpu, and its PipelineModule has built the layers of stage 1" in mesh


class Pair(nn.Module):
    """A layer that takes and returns a tuple: a hidden state, and a mask without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, mask = pair
        return self.block(hidden) * mask.unsqueeze(-1), mask


class Begin(nn.Embedding):
    """Makes the pair."""

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(ids), ids > 3


class End(nn.Linear):
    """Ends it."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(pair[0])


def pairs() -> nn.Module:
    return nn.Sequential(Begin(VOCABULARY, WIDTH), Pair(), Pair(), Pair(), End(WIDTH, VOCABULARY))


def frozen() -> nn.Module:
    """A model whose first stage has nothing to train but its norms."""
    model = chain()
    model[0].requires_grad_(False)
    return model


def in_place() -> nn.Module:
    """A model whose stages begin with a layer that changes its input in place."""
    model = chain()
    parts = [one for block in list(model)[1:-1] for one in (nn.ReLU(inplace=True), block)]
    return nn.Sequential(model[0], *parts, model[-1])


def hooked() -> nn.Module:
    """A model whose gradients the user's hooks change."""
    model = chain()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.register_hook(lambda grad: 0.5 * grad)
    return model


UNUSUAL: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "tuples": (pairs, {}),
    "recomputed": (chain, {"pipeline": {"stages": 2, "activation_checkpoint_interval": 1}}),
    "recomputed late": (chain, {"pipeline": {"stages": 2, "schedule": "zb-h1", "activation_checkpoint_interval": 1}}),
    "hooked late": (hooked, {"pipeline": {"stages": 2, "schedule": "zb-h1"}}),
    "frozen": (frozen, {}),
    "host": (lambda: Decoder(tied=True), {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}),
    "in place": (in_place, {}),
    "in place late": (in_place, {"pipeline": {"stages": 2, "schedule": "zb-h1"}}),
    "names": (chain, {}),
    "more rows": (chain, {}),
}


def train_unusual() -> dict[str, list[float]]:
    found = {}
    for name, (build, extra) in UNUSUAL.items():
        at = {"names": ["2"], "in place": ["5"], "in place late": ["5"]}.get(name, "auto")
        model = shardwell.pipeline.split(made(build), at=at, loss_fn=next_token_loss)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        config = {key: value for key, value in pipeline_config(3, "1f1b").items() if key != "optimizer"}
        engine, *_ = shardwell.initialize(model=model, optimizer=optimizer, config={**config, **extra})
        if name == "names":
            lists = "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3", "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"
            engine.use_schedule([one.split() for one in lists])
            held = {one.partition(".")[0] for one, _ in engine.module.named_parameters()}
            assert held == (set("01") if engine.is_first_stage() else set("23456"))
        rows = stream(STEPS, 0)
        found[name] = [float(engine.train_batch(rows)) for _ in range(STEPS)]
        if name == "more rows":
            wide = ((torch.cat([ids, ids]), torch.cat([labels, labels])) for ids, labels in stream(1, 0))
            found["evaluated"] = [float(engine.eval_batch(wide)), float(engine.eval_batch(stream(1, 0)))]
        engine.destroy(whole=False)
    return found


@pytest.mark.slow
def test_unusual_models_follow_plain_pytorch(ranks: Ranks) -> None:
    found = ranks.run(2, train_unusual)
    for name, (build, _) in UNUSUAL.items():
        expected = plain_losses(made(build), lambda model, batch: next_token_loss(model(batch[0]), batch[1]), stream, 1)
        for one in found:
            assert one[name] == pytest.approx(expected, abs=1e-9), name
            assert one["evaluated"][0] == pytest.approx(one["evaluated"][1])


MIXED = {"bf16": {"enabled": True}, "fp16": {"enabled": True, "initial_scale_power": 8}}


def train_mixed(block: str) -> list[list[float]]:
    """Train in mixed precision, as one process and as a pipeline."""
    losses = []
    for stages in (1, 2):
        config = {**pipeline_config(1, "1f1b", stages=stages), block: MIXED[block]}
        if stages == 1:
            config["train_micro_batch_size_per_gpu"] = 1
        torch.manual_seed(0)
        model = shardwell.pipeline.split(Decoder(tied=True), loss_fn=next_token_loss)
        engine, *_ = shardwell.initialize(model=model, config=config)
        mine = dist.get_rank() if stages == 1 else 0
        rows = (
            (ids[mine : mine + 1], labels[mine : mine + 1]) if stages == 1 else (ids, labels)
            for ids, labels in stream(6, 0)
        )
        losses.append([float(engine.train_batch(rows)) for _ in range(6)] + [engine.loss_scale])
        engine.destroy(whole=False)
    return losses


@pytest.mark.parametrize("block", MIXED)
def test_mixed_precision_trains_as_without_a_pipeline(ranks: Ranks, block: str) -> None:
    first, second = ranks.run(2, train_mixed, block)
    assert first == second
    alone, pipeline = first
    assert alone[-1] == pipeline[-1]  # the loss scale
    assert pipeline == pytest.approx(alone, rel=0.02)  # other rows are summed in 16 bits
    assert pipeline[5] < pipeline[0]


def train_copies() -> list[Tensor]:
    """Train tied embeddings in bf16, from other values on each rank; return their masters."""
    found = []
    for stage, schedule in ((1, "1f1b"), (3, "zb-h1")):
        torch.manual_seed(dist.get_rank())
        model = shardwell.pipeline.split(Decoder(tied=True), loss_fn=next_token_loss)
        config = {**pipeline_config(stage, schedule), "bf16": {"enabled": True}}
        engine, *_ = shardwell.initialize(model=model, config=config)
        batches = stream(8, engine.data_rank)
        for _ in range(8):
            engine.train_batch(batches)
        found.append(engine.parameters_snapshot()["tokens.weight"])
        engine.destroy(whole=False)
    return found


@pytest.mark.slow
def test_copies_of_tied_weights_stay_equal_to_the_bit(ranks: Ranks) -> None:
    first, *others = ranks.run(4, train_copies)
    for other in others:
        for one, copy in zip(first, other, strict=True):
            assert (torch.as_tensor(one) == torch.as_tensor(copy)).all()
