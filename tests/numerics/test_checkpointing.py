"""Checkpointed inputs may rest on the host or split over ranks: gradients are those without it, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

import shardwell
from shardwell import activation_checkpointing
from shardwell.activation_checkpointing import ActivationPolicy, checkpoint, patch_transformers
from tests.support.live_bytes import PeakWatch
from tests.support.model_parallel import Peers
from tests.support.models import Gpt, batches, share, whole_parameters, zero
from tests.support.ranks import Ranks

HOST = ActivationPolicy(on_host=True)


@pytest.fixture(params=[False, True], ids=["in place", "on the host"])
def _rests(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test that asks for it runs with inputs left where they are, and with inputs on the host."""
    before = activation_checkpointing._configured
    activation_checkpointing.configure(checkpoint_in_cpu=request.param)
    yield
    activation_checkpointing._configured = before


def gradients(run: Callable[..., Any], model: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """All outputs and gradients of one pass, from the same seed."""
    model.zero_grad()
    inputs = tuple(tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in inputs)
    torch.manual_seed(7)
    outputs = [leaf for leaf in tree_leaves(run(*inputs)) if isinstance(leaf, Tensor)]
    sum(output.square().sum() for output in outputs).backward()
    grads = [tensor.grad for tensor in (*inputs, *model.parameters()) if tensor.grad is not None]
    return [*(output.detach() for output in outputs), *(grad.clone() for grad in grads), torch.rand(3)]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def layers(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.GELU(), *more, nn.Linear(9, 6))


@pytest.mark.usefixtures("_rests")
def test_dropout_is_the_same_in_the_recomputation() -> None:
    model = layers(nn.Dropout(0.5))

    def twice(wrap: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
        return lambda x: wrap(model, wrap(model, x.sin()))

    x = torch.randn(5, 6)
    assert_same(gradients(twice(checkpoint), model, x), gradients(twice(lambda f, *a: f(*a)), model, x))


@pytest.mark.usefixtures("_rests")
def test_arguments_and_results_may_be_of_any_kind() -> None:
    model = layers()

    def block(
        x: Tensor, nothing: None, pair: tuple[Tensor, list[Any]], *, scale: float, named: dict[str, Tensor]
    ) -> dict[str, Any]:
        assert nothing is None
        assert pair[1][1] == "text"
        y = model(x * pair[0]) + pair[1][0] * named["mask"]
        return {"first": y, "rest": (y.sin() * scale, None, [named["index"].float() @ y])}

    def run(wrap: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, y, z, mask, index: wrap(
            block, x.cos(), None, (y, [z.exp(), "text"]), scale=0.5, named={"mask": mask, "index": index}
        )

    index = torch.arange(10).view(2, 5)
    inputs = torch.randn(5, 6), torch.randn(5, 6), torch.randn(6), torch.rand(5, 6), index
    plainly = gradients(run(lambda f, *a, **k: f(*a, **k)), model, *inputs)
    assert_same(gradients(run(checkpoint), model, *inputs), plainly)


@pytest.mark.usefixtures("_rests")
def test_checkpoints_may_be_nested() -> None:
    model = layers(nn.Dropout(0.3))

    def run(wrap: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
        def pair(x: Tensor) -> Tensor:
            return wrap(model, wrap(model, x).tanh())

        return lambda x: wrap(pair, wrap(pair, x.sin()))

    x = torch.randn(5, 6)
    assert_same(gradients(run(checkpoint), model, x), gradients(run(lambda f, *a: f(*a)), model, x))


@pytest.mark.usefixtures("_rests")
def test_without_gradients_it_is_a_plain_call() -> None:
    model, x = layers(), torch.randn(5, 6)
    with torch.no_grad():
        found = checkpoint(model, x)
    assert not found.requires_grad
    assert torch.equal(found, model(x).detach())


@pytest.mark.usefixtures("_rests")
def test_options_of_torch_are_not_arguments_of_the_function() -> None:
    x = torch.randn(3, requires_grad=True)
    out = checkpoint(torch.sin, x * 1, use_reentrant=True, preserve_rng_state=False, determinism_check="none")
    out.sum().backward()
    assert torch.equal(x.grad, x.detach().cos())


@pytest.mark.usefixtures("_rests")
@pytest.mark.parametrize("cut", ["transposed", "sliced", "expanded", "one element", "overlapping"])
def test_inputs_of_any_layout_come_back_as_they_were(cut: str) -> None:
    views: dict[str, Callable[[Tensor], Tensor]] = {
        "transposed": lambda x: x.t(),
        "sliced": lambda x: x[:, 1:4],
        "expanded": lambda x: x[:, None].expand(-1, 3, -1),
        "one element": lambda x: x[0, 0],
        "overlapping": lambda x: x.unfold(1, 3, 1),
    }
    strides = []

    def block(x: Tensor) -> Tensor:
        strides.append(x.stride())
        return x.sin().exp()

    def run(wrap: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
        return lambda x: wrap(block, views[cut](x * 2))

    x = torch.randn(5, 6)
    found = gradients(run(checkpoint), nn.Identity(), x)
    assert len(set(strides)) == 1
    assert_same(found, gradients(run(lambda f, *a: f(*a)), nn.Identity(), x))


@pytest.mark.usefixtures("_rests")
def test_a_graph_may_be_used_twice_and_differentiated_twice() -> None:
    model = layers()
    x = torch.randn(5, 6, requires_grad=True)
    seconds = []
    for wrap in (checkpoint, lambda f, *a: f(*a)):
        out = wrap(model, x.sin()).square().sum()
        (once,) = torch.autograd.grad(out, x, retain_graph=True)
        (first,) = torch.autograd.grad(out, x, create_graph=True)
        assert torch.equal(once, first)
        seconds += torch.autograd.grad(first.square().sum(), x)
    assert torch.equal(*seconds)


@pytest.mark.usefixtures("_rests")
def test_autocast_is_the_same_in_the_recomputation() -> None:
    model = layers()

    def run(wrap: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
        def cast(x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return wrap(model, x.sin())

        return cast

    x = torch.randn(5, 6)
    assert_same(gradients(run(checkpoint), model, x), gradients(run(lambda f, *a: f(*a)), model, x))


# ---------------------------------------------------------------------------------------------------- in host memory


def deep(policy: ActivationPolicy, x: Tensor, blocks: int = 4) -> Tensor:
    for _ in range(blocks):
        x = activation_checkpointing._run(policy, lambda y: y.sin().exp().cos(), (x,), {})
    return x.sum()


def test_an_input_on_the_host_is_another_storage_and_its_own_is_freed() -> None:
    x = torch.randn(40, requires_grad=True)
    y = x * 2
    storage = StorageWeakRef(y.untyped_storage())
    out = activation_checkpointing._run(HOST, torch.sin, (y,), {})
    assert torch.equal(out, y.sin())
    del y
    assert storage.expired()
    out.sum().backward()
    assert torch.equal(x.grad, 2 * (2 * x.detach()).cos())


def test_a_tensor_that_many_checkpoints_share_is_kept_once() -> None:
    x, mask = torch.randn(40, requires_grad=True), torch.rand(4000)

    def held(policy: ActivationPolicy) -> int:
        with PeakWatch() as watch:
            y = x * 1
            for _ in range(4):
                y = activation_checkpointing._run(policy, lambda y, m: (y * m[:40]).sin(), (y, mask), {})
            return watch.now() - watch.start

    assert held(HOST) == held(ActivationPolicy()) + mask.nbytes


def test_a_shared_tensor_that_changed_is_kept_again() -> None:
    x, scale = torch.ones(4, requires_grad=True), torch.ones(4)
    total = torch.zeros(4)
    for factor in (1.0, 3.0):
        scale.fill_(factor)
        total = total + activation_checkpointing._run(HOST, torch.mul, (x * 1, scale), {})
    total.sum().backward()
    assert torch.equal(x.grad, torch.full((4,), 4.0))


def test_inputs_that_nobody_comes_for_are_dropped() -> None:
    x = torch.randn(1000, requires_grad=True)
    with PeakWatch() as watch:
        loss = deep(HOST, x)
        assert watch.now() - watch.start >= 4 * x.nbytes
        del loss
        activation_checkpointing.reset()
        assert watch.now() == watch.start


# ----------------------------------------------------------------------------------------------------- split over ranks


def split_over_peers(numel: int, on_host: bool) -> dict[str, Any]:
    """Bytes that a forward keeps and its gradient, without and with splitting."""
    torch.manual_seed(0)
    x = torch.randn(numel, requires_grad=True)
    answer: dict[str, Any] = {}
    for split in (False, True):
        activation_checkpointing.configure(Peers(), partition_activations=split, checkpoint_in_cpu=split and on_host)
        assert activation_checkpointing.policy().splits is split
        with PeakWatch() as watch:
            loss = deep(activation_checkpointing.policy(), x * 1)
            answer[f"bytes {split}"] = watch.now() - watch.start
        (answer[f"grad {split}"],) = torch.autograd.grad(loss, x)
    return answer


@pytest.mark.parametrize("on_host", [False, True], ids=["on the device", "on the host"])
@pytest.mark.parametrize(("num_ranks", "numel"), [(2, 40_000), (2, 1), (2, 39_999), (3, 40_000)])
def test_each_rank_keeps_its_part_and_gradients_stay_the_same(
    ranks: Ranks, num_ranks: int, numel: int, on_host: bool
) -> None:
    for answer in ranks.run(num_ranks, split_over_peers, numel, on_host):
        assert (answer["grad True"] == answer["grad False"]).all()
        if numel > 1:
            assert answer["bytes False"] >= 4 * 4 * numel
            assert answer["bytes True"] <= answer["bytes False"] / num_ranks + 64


def split_alone() -> bool:
    activation_checkpointing.configure(Peers(), partition_activations=True)
    return bool(activation_checkpointing.policy())


def test_one_rank_splits_nothing(ranks: Ranks) -> None:
    assert ranks.run(1, split_alone) == [False]


# ------------------------------------------------------------------------------------------------- how it is configured


@pytest.mark.usefixtures("_rests")
def test_the_configuration_is_read_and_arguments_go_first() -> None:
    block = {"activation_checkpointing": {"cpu_checkpointing": True, "partition_activations": True}}
    activation_checkpointing.configure(None, block)
    assert activation_checkpointing.is_configured()
    assert activation_checkpointing.policy() == ActivationPolicy(on_host=True)
    activation_checkpointing.configure(deepspeed_config=shardwell.Config.model_validate(block), checkpoint_in_cpu=False)
    assert not activation_checkpointing.policy()
    activation_checkpointing.configure(
        checkpoint_in_cpu=True, contiguous_checkpointing=True, num_checkpoints=4, synchronize=True
    )
    activation_checkpointing.reset()
    assert activation_checkpointing.policy() == ActivationPolicy(on_host=True)
    with pytest.raises(shardwell.ConfigError, match="profile"):
        activation_checkpointing.configure(profile=True)


def test_before_it_is_configured_nothing_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_checkpointing, "_configured", None)
    assert not activation_checkpointing.is_configured()
    assert not activation_checkpointing.policy()


def test_a_hugging_face_model_is_adopted() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=29, **sizes)).train()
    tokens = batches(1, 4)[0]

    def step(model: nn.Module) -> tuple[list[Tensor], int]:
        model.zero_grad()
        with PeakWatch() as watch:
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            held = watch.now() - watch.start
        loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()], held

    expected, plain = step(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert patch_transformers(model, ActivationPolicy()) == 0
    assert patch_transformers(model, HOST) > 0
    found, held = step(copy.deepcopy(model))
    assert_same(found, expected)
    assert held < 0.7 * plain
    assert model.model._gradient_checkpointing_func.__module__ == activation_checkpointing.__name__


# ----------------------------------------------------------------------------------------------------- sharded training


class Recomputing(Gpt):
    """`Gpt` whose blocks are checkpointed by us."""

    def __init__(self, policy: ActivationPolicy | None) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)
        self.policy = policy

    def forward(self, tokens: Tensor) -> Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.embed(inputs) + self.position[: inputs.shape[1]]
        for block in self.blocks:
            if self.policy is None:
                x = self.dropout(block(x))
            else:
                x = activation_checkpointing._run(self.policy, lambda x, block=block: self.dropout(block(x)), (x,), {})
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def train(policy: ActivationPolicy | None, stage: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Recomputing(policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=zero(stage)).engine
    for step, batch in enumerate(batches(4, 8)):
        torch.manual_seed(step)
        engine.backward(engine(share(batch, dist.get_rank(), dist.get_world_size())))
        engine.step()
    return whole_parameters(model)


@pytest.mark.parametrize("policy", [ActivationPolicy(), HOST], ids=["in place", "on the host"])
@pytest.mark.parametrize("stage", [1, 3])
def test_sharded_training_gives_the_same_bits(ranks: Ranks, stage: int, policy: ActivationPolicy) -> None:
    expected = ranks.run(2, train, None, stage)
    for one, other in zip(ranks.run(2, train, policy, stage), expected, strict=True):
        for name in other:
            assert (one[name] == other[name]).all(), name
