"""Operations over outputs of which a rank has a part are refused; they gave other numbers without a word."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import shardwell
from shardwell.errors import ShardwellError
from shardwell.tensor_parallel import vocab_parallel_cross_entropy
from tests.support.models import zero
from tests.support.ranks import Ranks
from tests.support.training import distance

WIDTH, WORDS = 8, 24
Use = Callable[["Block", Tensor], Tensor]


class Block(nn.Module):
    """Layers that are cut, and what a model does between them."""

    def __init__(self, use: Use, *, wide: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(2 * WIDTH if wide else WIDTH, WIDTH)
        self.use = use

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.out(self.use(self, hidden))


def scores(block: Block, hidden: Tensor) -> Tensor:
    query, key = block.first(hidden), block.second(hidden)
    return (query @ key.transpose(-1, -2)).softmax(-1) @ key


def named_scores(block: Block, hidden: Tensor) -> Tensor:
    query, key = block.first(hidden), block.second(hidden)
    return torch.einsum("bqk,bkd->bqd", torch.einsum("bqd,bkd->bqk", query, key).softmax(-1), key)


def by_rows(block: Block, hidden: Tensor) -> Tensor:
    rows = block.first(hidden).reshape(-1, block.first.weight.shape[0])
    return (rows / rows.norm(dim=-1, keepdim=True)).view(*hidden.shape[:2], -1)


REFUSED: dict[str, Use] = {
    "softmax": lambda block, hidden: block.first(hidden).softmax(-1),
    "mean": lambda block, hidden: (found := block.first(hidden)) - found.mean(-1, keepdim=True),
    "mean of all": lambda block, hidden: (found := block.first(hidden)) - found.mean(),
    "rms": lambda block, hidden: (found := block.first(hidden)) * found.pow(2).mean(-1, keepdim=True).rsqrt(),
    "normalize": lambda block, hidden: F.normalize(torch.tanh(block.first(hidden)), dim=2),
    "topk": lambda block, hidden: (found := block.first(hidden)) * (found >= found.topk(2).values[..., -1:]),
    "amax": lambda block, hidden: (found := block.first(hidden)) / found.abs().amax(-1, keepdim=True),
    "sum": lambda block, hidden: block.first(hidden) * (block.first(hidden) * block.second(hidden)).sum(-1, True),
    "moved softmax": lambda block, hidden: block.first(hidden).transpose(1, 2).softmax(1).transpose(1, 2),
    "group_norm": lambda block, hidden: F.group_norm(block.first(hidden).transpose(1, 2), 2).transpose(1, 2),
    "roll": lambda block, hidden: torch.roll(block.first(hidden), 1, -1),
    "fft": lambda block, hidden: torch.fft.fft(block.first(hidden)).real,
    "scores": scores,
    "named scores": named_scores,
    "attention": lambda block, hidden: F.scaled_dot_product_attention(*[block.first(hidden)] * 3),
    "rows": by_rows,
    "named input": lambda block, hidden: torch.softmax(input=block.first(hidden), dim=-1),
    "named dimension": lambda block, hidden: torch.cumsum(input=block.first(hidden), dim=-1),
    "named pair": lambda block, hidden: (
        F.cosine_similarity(x1=(found := block.first(hidden)), x2=-found, dim=-1) * found
    ),
    "named factors": lambda block, hidden: torch.matmul(input=block.first(hidden), other=torch.ones(4, 4).double()),
    "named start": lambda block, hidden: (f := block.first(hidden)) * torch.narrow(input=f, dim=-1, start=0, length=1),
    "named place": lambda block, hidden: block.first(hidden).transpose(dim0=1, dim1=2).softmax(1).mT,
    "added product": lambda block, hidden: torch.baddbmm(hidden[..., :3], f := block.first(hidden), f.mT) @ f,
    "second factor": lambda block, hidden: (torch.ones(2, 3, 4).double() @ (f := block.first(hidden)).mT) @ f,
    "select": lambda block, hidden: (found := block.first(hidden)) * found.select(-1, 0)[..., None],
    "unbind": lambda block, hidden: (found := block.first(hidden)) * found.unbind(-1)[0][..., None],
    "pad": lambda block, hidden: F.pad(block.first(hidden), (1, 0))[..., :-1],
    "max_pool": lambda block, hidden: F.max_pool1d(block.first(hidden), 3, stride=1, padding=1),
    "instance_norm": lambda block, hidden: F.instance_norm(block.first(hidden)),
    "joined": lambda block, hidden: torch.cat([block.first(hidden), torch.tanh(block.second(hidden))], -1),
    "joined by name": lambda block, hidden: torch.cat(tensors=[block.first(hidden), block.second(hidden)], dim=-1),
}
RIGHT: dict[str, Use] = {
    "gate": lambda block, hidden: F.silu(block.first(hidden)) * block.second(hidden),
    "over tokens": lambda block, hidden: block.first(hidden).softmax(1) - block.second(hidden).mean(1, keepdim=True),
    "maximum": lambda block, hidden: (
        torch.max(block.first(hidden), block.second(hidden)).transpose(0, 1).transpose(0, 1)
    ),
    "joined in blocks": lambda block, hidden: torch.cat([block.first(hidden), block.second(hidden)], dim=-1),
}


def made(name: str, use: Use) -> Block:
    torch.manual_seed(0)
    return Block(use, wide=name.startswith("joined")).double()


def started(model: nn.Module, plan: dict[str, str]) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = zero(1, tensor_parallel={"autotp_size": 2, "plan": plan})
    return shardwell.initialize(model=model, optimizer=optimizer, config=config).engine


def uses() -> dict[str, Any]:
    """Return the words of what is refused, and what else trains to."""
    found: dict[str, Any] = {}
    inputs = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(1)).double()
    for name, use in (REFUSED | RIGHT).items():
        style = "packed_rowwise:2" if name == "joined in blocks" else "rowwise"
        engine = started(made(name, use), {"first": "colwise", "second": "colwise", "out": style})
        try:
            for _ in range(3):
                engine.backward(engine(inputs).square().sum())
                engine.step()
            found[name] = engine.state_dict()
        except ShardwellError as error:
            found[name] = str(error)
        engine.destroy(whole=False)
        dist.barrier()
    return found


@pytest.mark.slow
def test_what_is_over_parts_is_refused_and_the_rest_follows_one_process(ranks: Ranks) -> None:
    inputs = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(1)).double()
    expected = {}
    for name, use in RIGHT.items():
        model = made(name, use)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(inputs).square().sum().backward()
            optimizer.step()
        expected[name] = {key: value.detach() for key, value in model.state_dict().items()}
    for found in ranks.run(2, uses):
        for name in REFUSED:
            words = "joined into 2 blocks" if name.startswith("joined") else "each of 2 ranks has a part"
            words = "into 4 blocks" if name == "named start" else words
            assert words in found[name], name
        for name, values in expected.items():
            assert not isinstance(found[name], str), found[name]
            assert distance(found[name], values)[0] < 1e-10, name


class Words(nn.Module):
    """A last layer over a vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, hidden: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(hidden)}


LOSSES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "cross_entropy": lambda logits, targets: F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten()),
    "named cross_entropy": lambda logits, targets: F.cross_entropy(
        input=logits[:, :-1].flatten(0, 1), target=targets[:, 1:].flatten()
    ),
    "logsumexp": lambda logits, targets: logits.float().logsumexp(-1),
    "argmax": lambda logits, targets: logits[:, -1].argmax(-1),
    "log_softmax": lambda logits, targets: F.log_softmax(logits.cpu() / 2.0, dim=-1),
    "gather": lambda logits, targets: logits.gather(-1, targets.clamp(min=0)[..., None]),
}
WHEN = ("at first", "after training", "in evaluation", "after evaluation")


def losses() -> dict[str, Any]:
    inputs = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(1)).double()
    targets = torch.randint(WORDS, (2, 3), generator=torch.Generator().manual_seed(2))
    targets[0, 0] = -100
    torch.manual_seed(0)
    model: Any = Words().double()
    engine, found = started(model, {"head": "colwise"}), dict[str, Any]()

    def use(logits: Tensor, when: str) -> None:
        for name, loss in LOSSES.items():
            try:
                found[f"{name} {when}"] = str(loss(logits, targets))
            except ShardwellError as error:
                found[f"{name} {when}"] = str(error)

    use(engine(inputs)["logits"], "at first")
    for smoothing in (0.0, 0.3):
        capped = torch.tanh(engine(inputs)["logits"])
        loss = vocab_parallel_cross_entropy(capped, targets, model.head, label_smoothing=smoothing)
        engine.backward(loss)
        engine.step()
        found[f"{smoothing}"] = loss.item()
    logits = engine(inputs)["logits"]
    use(logits, "after training")
    engine.eval()
    use(engine(inputs)["logits"], "in evaluation")
    with torch.no_grad():
        for _ in range(4):
            last = engine(inputs)["logits"]
    use(last, "after evaluation")
    with pytest.raises(ValueError, match=r"reduction='median'.*expected mean, sum or none"):
        vocab_parallel_cross_entropy(logits, targets, model.head, reduction="median")
    return found | {"state": engine.state_dict()}


def test_losses_over_a_part_of_the_vocabulary_are_refused_and_the_right_one_smooths_labels(ranks: Ranks) -> None:
    inputs = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(1)).double()
    targets = torch.randint(WORDS, (2, 3), generator=torch.Generator().manual_seed(2))
    targets[0, 0] = -100
    torch.manual_seed(0)
    model = Words().double()
    optimizer, expected = torch.optim.SGD(model.parameters(), lr=0.1), dict[str, float]()
    for smoothing in (0.0, 0.3):
        logits = torch.tanh(model(inputs)["logits"]).flatten(0, 1)
        loss = F.cross_entropy(logits, targets.flatten(), label_smoothing=smoothing)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected[f"{smoothing}"] = loss.item()
    for found in ranks.run(2, losses):
        for name, when in product(LOSSES, WHEN):
            words = found[f"{name} {when}"]
            said = f"{name.removeprefix('named ')} is over the outputs of 'head.weight', of which each of 2 ranks has"
            assert said in words, when
            assert "vocab_parallel_cross_entropy" in words
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, abs=1e-12)
        assert distance(found["state"], {key: one.detach() for key, one in model.state_dict().items()})[0] < 1e-12
