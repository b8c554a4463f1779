"""What scripts for DeepSpeed do to parameters: states, whole and in parts, `ds_tensor`, leaf modules, own backwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardwell.compat.deepspeed_api import fragments, leaves
from shardwell.compat.deepspeed_api.enums import ZeroParamStatus
from shardwell.compat.deepspeed_api.initialization import initialize
from shardwell.compat.deepspeed_api.zero import GatheredParameters, Init
from shardwell.errors import ShardwellError
from tests.support.ranks import Ranks

STATES = ("exp_avg", "exp_avg_sq")


def config(stage: int, dtype: str = "fp32", **others: Any) -> dict[str, Any]:
    zero = {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})}
    half = {} if dtype == "fp32" else {dtype: {"enabled": True}}
    adam = {"type": "Adam", "params": {"lr": 1e-3}}
    return {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, "optimizer": adam, **half, **others}


class Two(nn.Module):
    """Two layers, the first of them frozen if that is asked for."""

    def __init__(self, *, frozen: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6, bias=bias)])
        self.layers[0].requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def seeded(make: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return make()


def batch(dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    torch.manual_seed(seed + dist.get_rank())
    return torch.randn(2, 6, dtype=dtype)


def engine_of(model: nn.Module, settings: dict[str, Any]) -> Any:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return initialize(model=model, model_parameters=trained, config=settings)[0]


# ---------------------------------------------------------------------------------------------- states of parameters


def states_of(stage: int, dtype: str, offload: str, folder: str) -> None:
    """Set weights, gradients and moments, whole and in parts, and read the same back."""
    settings = config(stage, dtype)
    if offload != "none":
        settings["zero_optimization"]["offload_optimizer"] = {"device": offload, "nvme_path": folder}
    engine = engine_of(seeded(lambda: Two(frozen=True)), settings)
    wide = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    kinds = ["full", "local"] if stage == 3 else ["full"]
    for _ in range(2):
        engine.backward(engine(batch(wide)).float().pow(2).mean())
        for kind in kinds:
            _check_states(engine, kind, {"fp32_param": torch.float32, "grad": wide})
        engine.step()
        for kind in kinds:
            _check_moments(engine, kind)
    engine.destroy()


def _check_states(engine: Any, kind: str, dtypes: dict[str, torch.dtype]) -> None:
    for name, parameter in engine.module.named_parameters():
        for what, dtype in dtypes.items():
            read = getattr(fragments, f"safe_get_{kind}_{what}")
            if not parameter.requires_grad:
                assert read(parameter) is None, (name, what)
                continue
            value = _values(parameter, kind, dtype)
            getattr(fragments, f"safe_set_{kind}_{what}")(parameter, value)
            assert torch.equal(read(parameter), value), (name, kind, what)


def _check_moments(engine: Any, kind: str) -> None:
    read = getattr(fragments, f"safe_get_{kind}_optimizer_state")
    for name, parameter in engine.module.named_parameters():
        for key in STATES:
            if not parameter.requires_grad:
                assert read(parameter, key) is None
                continue
            value = _values(parameter, kind, torch.float32)
            getattr(fragments, f"safe_set_{kind}_optimizer_state")(parameter, value, key)
            assert torch.equal(read(parameter, key), value), (name, kind, key)


def _values(parameter: Any, kind: str, dtype: torch.dtype) -> Tensor:
    shape = parameter.shape if kind == "full" else parameter.ds_tensor.shape
    value = torch.rand(shape, dtype=dtype)
    if kind == "full":
        dist.broadcast(value, 0)
    return value


@pytest.mark.parametrize(
    ("stage", "dtype", "offload"),
    [(1, "fp16", "none"), (2, "bf16", "cpu"), (3, "fp32", "none"), (3, "bf16", "cpu"), (3, "fp16", "nvme")],
)
def test_states_that_are_set_are_read_back(ranks: Ranks, tmp_path: Any, stage: int, dtype: str, offload: str) -> None:
    ranks.run(2, states_of, stage, dtype, offload, str(tmp_path))


def dtypes_of_gradients() -> list[Any]:
    found: list[Any] = []
    for accumulate in (None, "fp32"):
        settings = config(2, "bf16", data_types={"grad_accum_dtype": accumulate}, communication_data_type="fp32")
        engine = engine_of(seeded(Two), settings)
        engine.backward(engine(torch.ones(2, 6, dtype=torch.bfloat16)).sum())
        gradient = fragments.safe_get_full_grad(engine.module.layers[1].bias)
        assert gradient is not None
        parts = engine.optimizer.averaged_gradients
        found.append((str(gradient.dtype), list(parts), len(parts[0]), gradient.float().tolist()))
        engine.destroy()
    return found


def test_gradients_have_the_dtype_in_which_they_accumulate(ranks: Ranks) -> None:
    for found in ranks.run(2, dtypes_of_gradients):
        assert [one[0] for one in found] == ["torch.bfloat16", "torch.float32"]
        assert all(one[1:3] == ([0], 4) for one in found)
        assert found[0][3] == found[1][3] == [2.0] * 6


# ------------------------------------------------------------------------------------------------------- ds_tensor


def parts_of(inside: bool) -> None:
    """The parts of all ranks are the parameter; a part that is written reaches all ranks."""
    with Init(config_dict_or_path=config(3), enabled=inside):
        model: Any = seeded(Two)
    if not inside:
        model = engine_of(model, config(3)).module
    weight = model.layers[0].weight
    assert weight.ds_status in {ZeroParamStatus.NOT_AVAILABLE}
    sizes: list[Any] = [None] * 2
    dist.all_gather_object(sizes, weight.ds_tensor.tolist())
    assert sum(len(one) for one in sizes) == weight.ds_numel == 36
    assert weight.ds_tensor.dtype == weight.dtype
    assert torch.allclose(torch.full_like(weight.ds_tensor, 2.0), torch.tensor(2.0))
    with GatheredParameters([weight]):
        assert weight.detach().flatten().tolist() == [*sizes[0], *sizes[1]]
    if inside:
        return
    weight.ds_tensor.data = torch.full_like(weight.ds_tensor.data, 1.0 + dist.get_rank())
    with GatheredParameters([weight]):
        assert weight.detach().flatten().tolist() == [1.0] * len(sizes[0]) + [2.0] * len(sizes[1])
    with pytest.raises(AttributeError, match=r"write ds_tensor\.data"):
        weight.ds_tensor.grad = None


def test_ds_tensor_is_what_this_rank_stores(ranks: Ranks) -> None:
    ranks.run(2, parts_of, True)
    ranks.run(2, parts_of, False)


def modules_built_on_meta_have_labels() -> list[bool]:
    with Init(config_dict_or_path=config(3)):
        model = nn.Sequential(nn.utils.skip_init(nn.Linear, 4, 4), nn.Linear(4, 0))
    return [hasattr(parameter, "ds_id") for parameter in model.parameters()]


def test_parameters_with_elements_get_deepspeeds_attributes_also_if_they_were_built_on_meta(ranks: Ranks) -> None:
    assert ranks.run(1, modules_built_on_meta_have_labels) == [[True, True, False, False]]


# ----------------------------------------------------------------------------------------- backwards and their numbers


def like_ddp(stage: int, how: str) -> None:
    """The bf16 gradients and weights after each way to run backward are those of DDP in bf16."""
    plain = DistributedDataParallel(seeded(Two).bfloat16())
    adam = torch.optim.Adam(plain.parameters(), lr=1e-3)
    engine = engine_of(seeded(Two), config(stage, "bf16", gradient_clipping=0.0))
    x = batch(torch.bfloat16)
    if how == "twice":  # DDP averages the gradients of the first backward alone, so ranks have the same data
        dist.broadcast(x, 0)
    model: Any
    for model in (plain, engine):
        out = model(x)
        if how == "not scalar":
            out.backward(torch.ones_like(out))
        elif how == "scaled":
            (engine.scale(out.sum()) if model is engine else out.sum()).backward()
        else:
            out.sum().backward(retain_graph=True)
            (engine if model is engine else adam).zero_grad()
            out.pow(2).sum().backward()
    for one, other in zip(plain.module.parameters(), engine.module.parameters(), strict=True):
        gradient = fragments.safe_get_full_grad(other)
        assert gradient is not None
        assert gradient.dtype == torch.bfloat16
        torch.testing.assert_close(gradient, one.grad)
    adam.step()
    engine.step()
    for one, other in zip(plain.module.parameters(), engine.module.parameters(), strict=True):
        with GatheredParameters([other]):
            torch.testing.assert_close(other.detach().clone(), one.detach())
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_in_16_bits_begins_with_the_weights_that_ddp_has(ranks: Ranks, stage: int) -> None:
    for how in ("not scalar", "scaled", "twice"):
        ranks.run(2, like_ddp, stage, how)


def refused_uses() -> list[str]:
    engine = engine_of(seeded(Two), config(1))
    found = []
    for use in (
        lambda: engine.scale(engine(batch())),
        lambda: _step_inside(engine),
        lambda: engine.optimizer.fp16_groups,
    ):
        try:
            use()
        except (AssertionError, AttributeError) as error:
            found.append(str(error))
    return found


def _step_inside(engine: Any) -> None:
    with engine.no_sync():
        engine.step()


def test_uses_that_deepspeed_refuses_are_refused_in_its_words(ranks: Ranks) -> None:
    scalar, step, groups = ranks.run(1, refused_uses)[0]
    assert "expects a scalar tensor" in scalar
    assert "It is illegal to call Engine.step() inside no_sync context manager" in step
    assert "safe_get_local_fp32_param" in groups


# ------------------------------------------------------------------------------------------------------ leaf modules


class Chosen(nn.Module):
    """Each rank uses another of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])

    def forward(self, x: Tensor) -> Tensor:
        chosen: Tensor = self.layers[dist.get_rank() % 2](x)
        return chosen


def train_a_leaf() -> tuple[int, float]:
    model = seeded(Chosen)
    leaves.set_z3_leaf_modules(model, [Chosen])
    engine = engine_of(model, config(3))
    for _ in range(3):
        engine.backward(engine(batch()).pow(2).mean())
        engine.step()
    count = len(engine.optimizer.leaf_parameters)
    engine.destroy()
    return count, float(sum(parameter.double().sum() for parameter in model.parameters()))


def test_a_leaf_trains_although_ranks_use_different_parts_of_it(ranks: Ranks) -> None:
    first, second = ranks.run(2, train_a_leaf)
    assert first == second
    assert first[0] == 1


def test_a_class_that_no_module_has_is_a_value_error() -> None:
    for use in (leaves.set_z3_leaf_modules, leaves.unset_z3_leaf_modules):
        with pytest.raises(ValueError, match="no module of class Conv2d") as found:
            use(Two(), [nn.Conv2d])
        assert isinstance(found.value, ShardwellError)


# ------------------------------------------------------------------------------------------------ torch's own class


def compiled_beside_the_names() -> None:
    """`ds_status` on `torch.Tensor` is no stumbling block for what walks through all names of that class."""
    engine = engine_of(seeded(Two), config(2))
    assert isinstance(Tensor.__dict__["ds_status"], property)
    assert torch.Tensor.add in torch.overrides.get_overridable_functions()[torch.Tensor]
    doubled = torch.compile(lambda x: (2 * x).sum(), backend="eager")
    assert doubled(torch.ones(3)) == 6
    engine.compile(backend="eager")
    engine.backward(engine(batch()).sum())
    engine.step()
    assert torch.ones(1).ds_status is ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]
    assert not hasattr(nn.Parameter(torch.ones(1)), "ds_status")
    given: Any = nn.Parameter(torch.ones(1))
    given.ds_status = ZeroParamStatus.NOT_AVAILABLE
    assert given.ds_status is ZeroParamStatus.NOT_AVAILABLE
    del given.ds_status
    assert not hasattr(given, "ds_status")


def test_torch_compiles_beside_the_names(ranks: Ranks) -> None:
    ranks.run(2, compiled_beside_the_names)
