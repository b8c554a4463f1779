"""Stages hand on one hidden state: a model that computes more between its layers is refused, and not computed wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwell
from shardwell.errors import ShardwellError
from shardwell.pipeline import split
from shardwell.pipeline.batches import BatchReader
from shardwell.pipeline.stage_modules import StageModules
from tests.support.pipelines import LENGTH, VOCABULARY, WIDTH, next_token_loss, pipeline_config, stream
from tests.support.ranks import Ranks

NUM_STAGES = 3


class Layer(nn.Linear):
    """A layer that may get a second tensor."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, other: Tensor | None = None) -> Tensor:
        return torch.tanh(super().forward(hidden if other is None else hidden + other))


class Loops(nn.Module):
    """A model that runs its blocks as `loop` says."""

    def __init__(self, loop: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.tokens, self.values = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList((Several if loop in (of_lists, of_pairs) else Layer)() for _ in range(6))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.loop = loop
        self.statistics = nn.BatchNorm1d(WIDTH, affine=False)
        self.register_buffer("average", torch.zeros(WIDTH))
        self.__dict__["kept"] = []
        for block in self.blocks if loop in (of_a_list, of_an_argument) else ():
            block.__class__ = Keeps
            block.__dict__["kept"] = self.__dict__["kept"]

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.loop(self, self.tokens(ids), ids))
        return logits


class Residual(nn.Sequential):
    """An `nn.Sequential` that adds what its layers return."""

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self:
            hidden = hidden + layer(hidden)
        return hidden


def plainly(model: Any, hidden: Tensor, ids: Tensor) -> Tensor:
    for block in model.blocks:
        hidden = block(hidden)
    return hidden


def residual(model: Any, hidden: Tensor, ids: Tensor) -> Tensor:
    for block in model.blocks:
        hidden = hidden + block(hidden)
    return hidden


def scaled(model: Any, hidden: Tensor, ids: Tensor) -> Tensor:
    for block in model.blocks:
        hidden = block(hidden) * 0.5
    return hidden


def with_first(model: Any, hidden: Tensor, ids: Tensor) -> Tensor:
    first = hidden
    for block in model.blocks:
        hidden = block(hidden, first)
    return hidden


def with_values(model: Any, hidden: Tensor, ids: Tensor) -> Tensor:
    values = model.values(ids)
    for block in model.blocks:
        hidden = block(hidden, values)
    return hidden


def skipping(model: Any, hidden: Tensor, ids: Tensor) -> Tensor:
    kept = []
    for block in model.blocks[:3]:
        hidden = block(hidden)
        kept.append(hidden)
    for block in model.blocks[3:]:
        hidden = block(hidden, kept.pop())
    return hidden


def first_to_the_head(model: Any, hidden: Tensor, ids: Tensor) -> Tensor:
    return hidden + plainly(model, hidden, ids)


def backwards(model: Any, hidden: Tensor, ids: Tensor) -> Tensor:
    for block in reversed(model.blocks):
        hidden = block(hidden)
    return hidden


def twice(model: Any, hidden: Tensor, ids: Tensor) -> Tensor:
    return plainly(model, plainly(model, hidden, ids), ids)


def averaged(model: Any, hidden: Tensor, ids: Tensor) -> Tensor:
    found = []
    for block in model.blocks:
        hidden = block(hidden)
        found.append(hidden)
    return torch.stack(found).mean(0)


def of_the_batch(model: Any, hidden: Tensor, ids: Tensor) -> Tensor:
    """Every stage has the micro-batch."""
    for block in model.blocks:
        hidden = block(hidden, torch.nn.functional.one_hot(ids % WIDTH, WIDTH).to(hidden.dtype))
    return hidden


def copied(model: Any, hidden: Tensor, ids: Tensor) -> Tensor:
    for block in model.blocks:
        hidden = block(hidden.clone())
    return hidden


def changed_before(model: Any, hidden: Tensor, ids: Tensor) -> Tensor:
    hidden *= 2.0
    return plainly(model, hidden, ids)


def changed_between(model: Any, hidden: Tensor, ids: Tensor) -> Tensor:
    with torch.no_grad():
        for block in model.blocks:
            hidden = block(hidden)
            hidden *= 2.0
    return hidden


def by_kind(model: Any, hidden: Tensor, ids: Tensor) -> Tensor:
    """Layers have numbers and texts, which the model reads."""
    for block in model.blocks:
        hidden = block(hidden, None if block.in_features == WIDTH else hidden)
    return hidden


class Several(Layer):
    """A layer that returns a list."""

    def forward(self, hidden: Tensor, other: Tensor | None = None) -> Any:
        output = super().forward(hidden, other)
        return [output, output.square()]


def of_lists(model: Any, hidden: Tensor, ids: Tensor) -> Tensor:
    """Layers return something beside the hidden state, which nobody takes."""
    for block in model.blocks:
        hidden, _ = block(hidden.to(model.tokens.weight.device, model.head.weight.dtype))
    return hidden


def of_pairs(model: Any, hidden: Tensor, ids: Tensor) -> Tensor:
    other = None
    for block in model.blocks:
        hidden, other = block(hidden, other)
    return hidden


def tied_by_hand(model: Any, hidden: Tensor, ids: Tensor) -> Tensor:
    return plainly(model, hidden, ids) + model.values.weight.sum()


def tied_by_product(model: Any, hidden: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.linear(plainly(model, hidden, ids), model.tokens.weight)


def detached(model: Any, hidden: Tensor, ids: Tensor) -> Tensor:
    values = model.values(ids).detach()
    for block in model.blocks:
        hidden = block(hidden, values)
    return hidden


def masked(model: Any, hidden: Tensor, ids: Tensor) -> Tensor:
    """No gradient passes a mask."""
    mask = torch.zeros_like(hidden)
    mask[hidden > 0] = 1.0
    for block in model.blocks:
        hidden = block(hidden, mask)
    return hidden


def by_shape(model: Any, hidden: Tensor, ids: Tensor) -> Tensor:
    """Sizes, dtypes and devices of embeddings are right on every stage."""
    other = torch.zeros_like(hidden) + hidden.new_ones(hidden.shape[-1]).cumsum(-1)
    for block in model.blocks:
        hidden = block(hidden, other)
    return hidden


class Keeps(Layer):
    """A layer that leaves something beside what it returns: in a list of the model, or in an argument."""

    def forward(self, hidden: Tensor, other: Any = None) -> Tensor:
        output = super().forward(hidden)
        if other is None:
            self.__dict__["kept"].append(output.square().mean())
        else:
            other[0] = other[0] + output.square().mean()
        return output


def of_a_list(model: Any, hidden: Tensor, ids: Tensor) -> Tensor:
    model.kept.clear()
    hidden = plainly(model, hidden, ids)
    return hidden + sum(model.kept)


def of_an_argument(model: Any, hidden: Tensor, ids: Tensor) -> Tensor:
    found = [hidden.new_zeros(())]
    for block in model.blocks:
        hidden = block(hidden, found)
    return hidden + found[0]


def of_parameters(model: Any, hidden: Tensor, ids: Tensor) -> Tensor:
    return plainly(model, hidden, ids) + sum(one.square().mean() for one in model.blocks[-1].parameters())


def running_mean(model: Any, hidden: Tensor, ids: Tensor) -> Tensor:
    model.average.mul_(0.9).add_(hidden.detach().mean((0, 1)))
    return plainly(model, hidden - model.average, ids)


def normalized(model: Any, hidden: Tensor, ids: Tensor) -> Tensor:
    return model.statistics(plainly(model, hidden, ids).transpose(1, 2)).transpose(1, 2)


def counting(model: Any, hidden: Tensor, ids: Tensor) -> Tensor:
    """A buffer that is the same on all stages."""
    model.average.mul_(0.9).add_(1.0)
    return plainly(model, hidden, ids) * model.average


class Inside(nn.Sequential):
    """An `nn.Sequential` that changes its input."""

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self:
            hidden += layer(hidden)
        return hidden


def in_stages(model: nn.Module, inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Run stages one after another, and their backwards; return the output, and the gradients."""
    outputs, received, parts = [], [], []
    hidden: Tensor | None = None
    wraps = 0  # which a message says
    for stage in range(NUM_STAGES):
        divided = split(copy.deepcopy(model))
        modules = StageModules(divided.layers, divided.borders(NUM_STAGES, "uniform"), stage, NUM_STAGES)
        if hidden is not None:
            hidden = hidden.detach().requires_grad_(torch.is_grad_enabled())
            received.append(hidden)
        modules.passage.wraps = wraps
        with modules.running(stage, hidden):
            hidden = divided.model(inputs if hidden is None or not divided.layers.is_chain else hidden)
        wraps = modules.passage.wraps
        outputs.append(hidden)
        parts.append(divided.model)
    gradient: Tensor | None = None
    for stage in reversed(range(NUM_STAGES if torch.is_grad_enabled() else 0)):
        torch.autograd.backward(outputs[stage] if gradient is not None else outputs[stage].sum(), gradient)
        gradient = received[stage - 1].grad if stage else None
    found = {name: one.grad for part in parts for name, one in part.named_parameters() if one.grad is not None}
    return outputs[-1].detach(), found


BESIDE = "layers, or modules behind them, use what modules before the layers or layers of earlier stages compute"
BETWEEN = "the model does not call layer '[a-z0-9.]+' with what the layer before it returned"


@pytest.mark.parametrize(
    ("loop", "words"),
    [
        (residual, BETWEEN),
        (scaled, BETWEEN),
        (backwards, BETWEEN),
        (twice, "calls its layers more than once in a forward"),
        (with_first, BESIDE),
        (with_values, BESIDE),
        (skipping, BESIDE),
        (first_to_the_head, BESIDE),
        (averaged, BESIDE),
        (changed_between, BETWEEN),
        (of_pairs, "with several tensors that the layer before it returned, of which stages send the first"),
        (detached, BESIDE),
        (masked, BESIDE),
        (tied_by_hand, "the model uses 'values.weight' of a module that another stage has"),
        (tied_by_product, "the model uses 'tokens.weight' of a module that another stage has"),
    ],
)
def test_a_model_that_hands_on_more_than_a_hidden_state_is_refused(loop: Any, words: str) -> None:
    with pytest.raises(ShardwellError, match=words):
        in_stages(Loops(loop), torch.randint(0, VOCABULARY, (2, LENGTH)))


@pytest.mark.parametrize("loop", [with_first, with_values, skipping, detached, masked])
def test_evaluation_is_refused_as_training_is(loop: Any) -> None:
    """There are no gradients by which it is seen."""
    with torch.no_grad(), pytest.raises(ShardwellError, match=BESIDE):
        in_stages(Loops(loop), torch.randint(0, VOCABULARY, (2, LENGTH)))


def evaluated() -> list[str]:
    """Evaluate models whose outputs are made of values of other stages, beside the layers."""
    said = []
    for loop in (first_to_the_head, averaged, plainly):
        model = split(Loops(loop).double(), loss_fn=next_token_loss)
        engine: Any = shardwell.initialize(model=model, config=pipeline_config(1, "1f1b")).engine
        try:
            said.append(f"{engine.eval_batch(stream(1, 0)):.0f}")
        except ShardwellError as error:
            said.append(str(error))
        engine.destroy(whole=False)
        dist.barrier()
    return said


ASIDE = "the loss depends on layers not only through what the last one returned"
TRAINED: list[tuple[Any, str]] = [
    (of_a_list, ASIDE),
    (of_parameters, ASIDE),
    (of_an_argument, "changes a tensor among its arguments beside the hidden state"),
    (running_mean, "buffer 'average' beside the layers is updated with hidden states"),
    (normalized, "buffer 'statistics.running_mean' beside the layers is updated with hidden states"),
    (counting, ""),
]


def trained() -> list[str]:
    """Train models in which layers, buffers or the loss know of other stages."""
    said = []
    for loop, _ in TRAINED:
        model = split(Loops(loop).double(), loss_fn=next_token_loss)
        engine: Any = shardwell.initialize(model=model, config=pipeline_config(1, "1f1b")).engine
        try:
            engine.train_batch(stream(1, 0))
            said.append("")
        except ShardwellError as error:
            said.append(str(error))
        engine.destroy(whole=False)
        dist.barrier()
    return said


def test_what_passes_stages_beside_the_hidden_state_is_refused(ranks: Ranks) -> None:
    """The last stage would have the part of its own layers, and checkpoints the buffers of any stage."""
    for number, found in enumerate(zip(*ranks.run(2, trained), strict=True)):
        words = TRAINED[number][1]
        assert any(words in one for one in found), (TRAINED[number], found)
        assert all(bool(one) is bool(words) for one in found)


def test_an_output_that_is_made_of_values_of_other_stages_is_refused_in_evaluation(ranks: Ranks) -> None:
    for rank, (first, mean, right) in enumerate(ranks.run(2, evaluated)):
        assert BESIDE in first if rank else "rank 1 failed first" in first
        assert BESIDE in mean if rank else "rank 1 failed first" in mean
        assert float(right) > 0


@pytest.mark.parametrize("kind", [Residual, Inside])
@pytest.mark.parametrize("trains", [True, False])
def test_a_sequential_with_a_forward_of_its_own_is_refused(kind: Any, trains: bool) -> None:
    with torch.set_grad_enabled(trains), pytest.raises(ShardwellError, match=BETWEEN):
        in_stages(kind(*(Layer() for _ in range(6))), torch.randn(2, LENGTH, WIDTH))


@pytest.mark.parametrize("key", ["output_router_logits", "output_hidden_states"])
def test_values_of_all_layers_are_refused_where_the_last_stage_has_some(key: str) -> None:
    """A loss of routers would be of the last stage's routers alone."""
    model: Any = Loops(plainly)
    model.config = SimpleNamespace(**{key: True})
    reader, ids = BatchReader(model, None, is_chain=False), torch.zeros(2, LENGTH, dtype=torch.long)
    for received, is_last in ((None, False), (torch.zeros(2, LENGTH, WIDTH), True)):
        with pytest.raises(ShardwellError, match=f"{key} asks for values of all layers"):
            reader.arguments({"ids": ids}, received, is_last=is_last)
        with pytest.raises(ShardwellError, match="last stage has those of its own layers only"):
            BatchReader(Loops(plainly), None, is_chain=False).arguments({key: True}, received, is_last=is_last)
        assert reader.arguments({"ids": ids, key: False}, received, is_last=is_last)[1]["ids"] is ids
    assert reader.arguments(ids, None, is_last=True) == ((ids,), {})  # one stage has them all


@pytest.mark.parametrize("loop", [plainly, of_the_batch, copied, changed_before, by_kind, by_shape, of_lists])
def test_stages_compute_what_the_model_does(loop: Any) -> None:
    model, ids = Loops(loop), torch.randint(0, VOCABULARY, (2, LENGTH))
    with torch.no_grad():
        evaluated, _ = in_stages(model, ids)
    found, gradients = in_stages(model, ids)
    expected = model(ids)
    expected.sum().backward()
    assert torch.equal(found, expected)
    assert torch.equal(evaluated, expected)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert torch.allclose(gradients[name], parameter.grad), name
