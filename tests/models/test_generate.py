"""Generating text from a sharded model between its training steps, and a frozen reference model beside it."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardwell
from tests.support import zoo
from tests.support.models import whole_parameters, zero
from tests.support.ranks import Ranks
from tests.support.zoo import Run

NEW = 6  # tokens


def prompts(name: str, rank: int = 0, num_ranks: int = 1) -> dict[str, Tensor]:
    batch = zoo.batches(name, 1, seed=5)[0]
    del batch["labels"]
    if "input_ids" in batch:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    return zoo.share(batch, rank, num_ranks)


@torch.no_grad()
def generate(model: nn.Module, inputs: dict[str, Tensor], num_new: int = NEW, **options: Any) -> Tensor:
    """Greedy, with a cache, always the same number of tokens."""
    model.eval()
    fixed = {"min_new_tokens": num_new, "max_new_tokens": num_new, "do_sample": False, "use_cache": True}
    tokens = model.generate(**inputs, **fixed, **options)
    model.train()
    return tokens


# ------------------------------------------------------------------------------------------ between training steps


class Generating:
    """A model or engine that generates before each training step."""

    def __init__(self, trained: nn.Module, model: nn.Module, inputs: dict[str, Tensor]) -> None:
        self._trained, self._model, self._inputs = trained, model, inputs
        self.tokens: list[Tensor] = []

    def __call__(self, **batch: Tensor) -> Any:
        self.tokens.append(generate(self._model, self._inputs))
        return self._trained(**batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trained, name)


@cache
def plain(name: str) -> tuple[list[Tensor], Run]:
    model = zoo.disturb(zoo.build(name))
    generating = Generating(model, model, prompts(name))
    run = zoo.train_plainly(generating, name)
    return [*generating.tokens, generate(model, prompts(name))], run


def generating_at(name: str, stage: int) -> tuple[list[Tensor], Run, Run]:
    quiet = zoo.train_sharded(zoo.disturb(zoo.build(name)), name, stage)
    engine = zoo.make_engine(zoo.disturb(zoo.build(name)), stage)
    inputs = prompts(name, engine.global_rank, engine.world_size)
    generating = Generating(engine, engine.module, inputs)
    run = zoo.train(generating, name)
    return [*generating.tokens, generate(engine.module, inputs)], run, quiet


@pytest.mark.parametrize(
    ("name", "stage"),
    [("llama", 1), ("llama", 2), ("llama", 3), ("gpt2", 3), ("mixtral", 1), ("mixtral", 3), ("t5", 2), ("whisper", 3)],
)
def test_generating_gives_the_plain_tokens_and_disturbs_nothing(ranks: Ranks, name: str, stage: int) -> None:
    expected, trained_plainly = plain(name)
    answers = ranks.run(2, generating_at, name, stage)
    for rank, (tokens, (losses, norms, parameters), quiet) in enumerate(answers):
        for found, reference in zip(tokens, expected, strict=True):
            assert found.tolist() == reference.chunk(2)[rank].tolist()
        assert (losses, norms) == quiet[:2]
        assert all((values == quiet[2][key]).all() for key, values in parameters.items())
    zoo.check([run for _, run, _ in answers], trained_plainly)


def test_the_tokens_change_while_training() -> None:
    """Otherwise the test above would not see a generation from old weights."""
    for name in ("llama", "gpt2", "mixtral", "t5", "whisper"):
        assert len({tuple(tokens.flatten().tolist()) for tokens in plain(name)[0]}) > 1, name


def unequal_lengths() -> list[list[int]]:
    """Rank 1 wants more tokens; `synced_gpus` keeps rank 0 running beside it."""
    engine = zoo.make_engine(zoo.disturb(zoo.build("llama")), 3)
    rank = engine.global_rank
    return generate(engine.module, prompts("llama", rank, 2), 2 + 3 * rank, synced_gpus=True).tolist()


def test_ranks_may_generate_unequally_many_tokens_in_step(ranks: Ranks) -> None:
    model = zoo.disturb(zoo.build("llama"))
    for rank, found in enumerate(ranks.run(2, unequal_lengths)):
        assert found == generate(model, prompts("llama", rank, 2), 2 + 3 * rank).tolist()


# ------------------------------------------------------------------------------------------- a reference model


def preference_loss(policy: nn.Module, reference: nn.Module, batch: Tensor, together: bool) -> Tensor:
    """Direct preference optimization: the first half of each row is liked, the second half is not."""
    liked, other = batch.chunk(2, dim=1)

    def likelihoods(model: nn.Module) -> tuple[Tensor, Tensor]:
        if together:
            both = likelihood(model, torch.cat([liked, other]))
            return both[: len(liked)], both[len(liked) :]
        return likelihood(model, liked), likelihood(model, other)

    wanted, unwanted = likelihoods(policy)
    with torch.no_grad():
        before_wanted, before_unwanted = likelihoods(reference)
    return -F.logsigmoid(0.5 * (wanted - before_wanted - unwanted + before_unwanted)).mean()


def likelihood(model: nn.Module, words: Tensor) -> Tensor:
    scores = model(input_ids=words).logits[:, :-1].log_softmax(-1)
    return scores.gather(2, words[:, 1:, None]).sum((1, 2))


def preferences(num_steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(3, zoo.VOCAB, (zoo.ROWS, 12), generator=generator) for _ in range(num_steps)]


def policy_and_reference() -> tuple[nn.Module, nn.Module]:
    return zoo.disturb(zoo.build("llama")), zoo.disturb(zoo.build("llama", seed=1)).eval().requires_grad_(False)


def beside_a_reference(stage: int, together: bool) -> Run:
    policy, frozen = policy_and_reference()
    engine = zoo.make_engine(policy, stage)
    reference = shardwell.initialize(model=frozen, config=zero(3)).engine
    assert reference.optimizer is None
    losses, norms = [], []
    for batch in preferences(zoo.STEPS):
        rows = batch.chunk(dist.get_world_size())[dist.get_rank()]
        loss = preference_loss(engine, reference, rows, together)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(engine.get_global_grad_norm())
    after = whole_parameters(frozen)
    assert all((after[key] == values).all() for key, values in policy_and_reference()[1].named_parameters())
    return losses, norms, whole_parameters(policy)


@pytest.mark.parametrize("together", [True, False], ids=["one-forward", "two-forwards"])
def test_a_frozen_reference_beside_a_trained_model(ranks: Ranks, together: bool) -> None:
    policy, frozen = policy_and_reference()
    optimizer = torch.optim.AdamW(policy.parameters(), **zoo.ADAMW)
    losses, norms = [], []
    for batch in preferences(zoo.STEPS):
        optimizer.zero_grad()
        loss = preference_loss(policy, frozen, batch, together)
        loss.backward()
        losses.append(loss.item())
        norms.append(float(nn.utils.clip_grad_norm_(policy.parameters(), zoo.CLIP)))
        optimizer.step()
    expected = losses, norms, {key: parameter.detach() for key, parameter in policy.named_parameters()}
    for stage in (1, 3) if together else (2, 3):
        zoo.check(ranks.run(2, beside_a_reference, stage, together), expected, what=f"stage {stage}")
