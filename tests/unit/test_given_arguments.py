"""What `initialize` is given in code: what it cannot honour is refused in a sentence, and nothing is left untrained."""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import ConstantLR, ReduceLROnPlateau, StepLR

import shardwell
from tests.support.models import zero


class Net(nn.Module):
    """Two layers, and what a test adds."""

    def __init__(self, **more: nn.Parameter) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 1)
        for name, parameter in more.items():
            self.register_parameter(name, parameter)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x)).square().mean()


class Forgetful(Optimizer):
    """An optimizer whose constructor is not torch's."""

    def __init__(self, params: Any) -> None:
        pass


def refusal(**given: Any) -> str:
    """What `initialize` says; a model and an optimizer of a file are there unless `given`."""
    config = zero(2, optimizer={"type": "AdamW", "params": {"lr": 0.1}})
    if "optimizer" in given:
        del config["optimizer"]
    with pytest.raises(shardwell.ShardwellError) as caught:
        shardwell.initialize(**{"model": Net(), "config": config, "device": "cpu", **given})
    return str(caught.value)


def used_up(net: Net) -> Any:
    found = net.parameters()
    list(found)
    return found


def first(net: Net, **options: Any) -> list[dict[str, Any]]:
    return [{"params": net.up.parameters(), **options}]


PARAMETERS: dict[str, tuple[Callable[[Net], Any], str]] = {
    "an iterator that was used up": (used_up, "there are no parameters, so that nothing would be trained"),
    "an empty group": (lambda net: [{"params": []}], "nothing would be trained"),
    "those of another model": (lambda net: Net().parameters(), "of its 4 parameters none belong to the model"),
    "those of a copy": (lambda net: copy.deepcopy(net).parameters(), "none belong to the model"),
    "values of the state": (lambda net: net.state_dict().values(), "none belong to the model"),
    "one more": (lambda net: [*net.parameters(), nn.Parameter(torch.ones(3))], "only 4 belong to the model"),
    "a name for each": (lambda net: dict(net.named_parameters()), "is a dict; expected parameters"),
    "a module": (lambda net: net, "is a Net; expected parameters"),
    "modules": (lambda net: [net.up], "model_parameters[0] is a Linear"),
    "one parameter": (lambda net: net.up.weight, "is a Parameter; expected parameters"),
    "a method": (lambda net: net.parameters, "is a method; expected parameters"),
    "names": (lambda net: ["up.weight"], "model_parameters[0] is a str"),
    "None": (lambda net: [None], "model_parameters[0] is a NoneType"),
    "lists": (lambda net: [[net.up.weight]], "model_parameters[0] is a list"),
    "groups and others": (lambda net: [net.up.weight, *first(net)], "model_parameters[0] is a Parameter among"),
    "a group of nothing": (lambda net: [{"lr": 0.1}], "model_parameters[0] is a parameter group without 'params'"),
    "one twice": (lambda net: [net.up.weight, net.up.weight], "'up.weight' is there twice (parameter group 0)"),
    "one in two groups": (lambda net: first(net) + first(net), "'up.weight' is there twice (parameter groups 0 and 1)"),
    "a rate in quotes": (lambda net: first(net, lr="0.1"), "lr must be a finite number, found '0.1'"),
    "a rate that is none": (lambda net: first(net, lr=float("nan")), "lr must be a finite number, found nan"),
    "no rate": (lambda net: first(net, lr=None), "lr must be a finite number, found None"),
    "one of two betas": (lambda net: first(net, betas=0.9), "betas must be 2 finite numbers, found 0.9"),
    "three betas": (lambda net: first(net, betas=(0.9,) * 3), "betas must be 2 finite numbers, found (0.9, 0.9, 0.9)"),
}


@pytest.mark.parametrize("what", PARAMETERS)
def test_parameters_that_cannot_be_trained_are_refused(what: str) -> None:
    make, words = PARAMETERS[what]
    net = Net()
    assert words in refusal(model=net, model_parameters=make(net))


def changed(net: Net, **options: Any) -> Optimizer:
    made = AdamW(net.parameters())
    made.param_groups[0].update(options)
    return made


OPTIMIZERS: dict[str, tuple[Callable[[Net], Any], str]] = {
    "of another model": (lambda net: AdamW(Net().parameters()), "the AdamW that was passed: of its 4 parameters none"),
    "of one more": (lambda net: AdamW([*net.parameters(), nn.Parameter(torch.ones(3))]), "only 4 belong to the model"),
    "that forgot torch's": (lambda net: Forgetful(net.parameters()), "has no parameter groups"),
    "that is a model": (lambda net: net, "the optimizer is a model (Net)"),
    "with a rate that is none": (lambda net: changed(net, lr="x"), "lr must be a finite number, found 'x'"),
    "made of the model's parameters": (
        lambda net: lambda groups: AdamW(net.parameters()),
        "the optimizer factory made a AdamW of other parameters",
    ),
}


@pytest.mark.parametrize("what", OPTIMIZERS)
def test_optimizers_that_would_train_nothing_are_refused(what: str) -> None:
    make, words = OPTIMIZERS[what]
    net = Net()
    assert words in refusal(model=net, optimizer=make(net))


SCHEDULES: dict[str, tuple[Any, str]] = {
    "a number": (3, "a int is no scheduler"),
    "a name": ("StepLR", "a str is no scheduler"),
    "what a function forgot to return": (lambda optimizer: None, "the function returned a NoneType"),
    "one of another optimizer": (
        ConstantLR(SGD(Net().parameters(), lr=0.1)),
        "the ConstantLR was made for an optimizer that is not the engine's",
    ),
    "one that needs the loss": (ReduceLROnPlateau, "ReduceLROnPlateau.step() needs metrics"),
}


@pytest.mark.parametrize("what", SCHEDULES)
def test_schedules_that_would_change_nothing_are_refused(what: str) -> None:
    given, words = SCHEDULES[what]
    assert words in refusal(lr_scheduler=given)


def test_a_schedule_of_the_optimizer_that_was_passed_or_its_class_is_followed() -> None:
    for by_class in (True, False):
        net = Net()
        optimizer = SGD(net.parameters(), lr=0.1)
        given: Any = ConstantLR if by_class else StepLR(optimizer, 1, 0.5)
        engine = shardwell.initialize(model=net, optimizer=optimizer, lr_scheduler=given, config=zero(2)).engine
        before = engine.get_lr()
        for _ in range(5):
            engine.backward(engine(torch.ones(2, 4)))
            engine.step()
        assert engine.get_lr() != before


def in_itself() -> nn.Module:
    net = Net()
    net.up.parent = net
    return net


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "a name": (lambda: "gpt2", "expected a torch.nn.Module, found a str"),
    "a class": (lambda: Net, "found the class Net: make a model of it"),
    "weights": (lambda: Net().state_dict(), "found a OrderedDict"),
    "a model inside of itself": (in_itself, "the model's module 'up.parent' is '(root)', which it is inside of"),
    "a sparse parameter": (lambda: Net(odd=nn.Parameter(torch.eye(3).to_sparse())), "'odd' is sparse (sparse_coo)"),
    "a compressed parameter": (
        lambda: Net(odd=nn.Parameter(torch.eye(3).to_sparse_csr(), requires_grad=False)),
        "'odd' is sparse (sparse_csr)",
    ),
    "a trainable parameter of 8 bits": (
        lambda: Net(odd=nn.Parameter(torch.ones(4).to(torch.float8_e4m3fn))),
        "'odd' is trainable and float8_e4m3fn",
    ),
    "a part without values": (
        lambda: Net(odd=nn.Parameter(torch.ones(3, device="meta"))),
        "1 of 5 parameters are on the meta device, without values (the first is 'odd')",
    ),
}


@pytest.mark.parametrize("what", MODELS)
def test_what_is_no_model_or_cannot_be_sharded_is_refused(what: str) -> None:
    make, words = MODELS[what]
    assert words in refusal(model=make())


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "a file of data": ({"training_data": "data.txt"}, "training_data: expected a data set"),
    "a device of another kind": ({"device": "mps"}, "expected cpu, cuda or cuda:INDEX"),
    "a device that is a number": ({"device": 3.5}, "'3.5' is no device"),
    "a folder with a name too long": (
        {"config": zero(3, zero_optimization={"offload_param": {"device": "nvme", "nvme_path": "/tmp/" + "a" * 300}})},
        "offload_param.nvme_path: expected a path whose names have at most 255 bytes each",
    ),
    "arguments that are a number": ({"args": 3}, "expected what argparse returns, found a int"),
    "arguments without a configuration": (
        {"args": Namespace(), "config": None},
        "the Namespace has no deepspeed_config, and there is no config",
    ),
    "two configurations": ({"config_params": zero(3)}, "got two configurations, config and config_params"),
    "one in arguments, too": ({"args": {"deepspeed_config": "x.json"}}, "config and args.deepspeed_config, which"),
    "a number for an mpu": ({"mpu": 3}, "the int answers neither get_data_parallel_world_size()"),
    "a number for a class": ({"engine_class": 3}, "expected shardwell.Engine or a subclass, found int"),
    "a class of another kind": ({"engine_class": Net}, "expected shardwell.Engine or a subclass, found the class Net"),
    "a number for a function": ({"collate_fn": 3}, "expected a function of a list of samples, found int"),
    "a device without values": ({"device": "meta"}, "parameter 'up.weight' has some on cpu"),
    "steps for graphs of CUDA": (
        {"optimizer": lambda groups: AdamW(groups, capturable=True)},
        "parameter group 0 of the AdamW: capturable=True is for graphs of CUDA",
    ),
    "an array for betas": (
        {"config": zero(2, optimizer={"type": "AdamW", "params": {"betas": torch.tensor([0.9, 0.99]).numpy()}})},
        "optimizer.params.betas: expected a list of 2 numbers",
    ),
}


@pytest.mark.parametrize("what", OTHERS)
def test_other_arguments_that_cannot_work_are_refused(what: str) -> None:
    given, words = OTHERS[what]
    assert words in refusal(**given)


@pytest.mark.parametrize("value", ["x", 3, None, torch.ones(3)], ids=str)
def test_flags_that_are_none_are_refused_before_anything_changes(value: Any) -> None:
    net = Net()
    engine = shardwell.initialize(model=net, optimizer=SGD(net.parameters(), lr=0.1), config=zero(2)).engine
    loss = engine(torch.ones(2, 4))
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("scale_wrt_gas", lambda: engine.backward(loss, scale_wrt_gas=value)),
        ("create_graph", lambda: engine.backward(loss, create_graph=value)),
        ("set_gradient_accumulation_boundary", lambda: engine.set_gradient_accumulation_boundary(value)),
        ("divide_by_initial_world_size", lambda: engine.join(value).__enter__()),
    ]
    if value is not None:
        calls.append(("retain_graph", lambda: engine.backward(loss, retain_graph=value)))
    for name, call in calls:
        with pytest.raises(shardwell.ShardwellError, match=f"{name}.*: expected True or False, found"):
            call()
    engine.set_gradient_accumulation_boundary(torch.tensor(True))  # type: ignore[arg-type]
    engine.backward(loss, retain_graph=1)  # type: ignore[arg-type]
    engine.step()
    assert engine.global_steps == 1


@pytest.mark.parametrize("commit", ["auto", "at_once"])
@pytest.mark.parametrize(("name", "words"), [("lr", "the learning rate (lr)"), ("weight_decay", "weight_decay")])
def test_options_that_become_nan_are_named_before_the_model_is_ruined(name: str, words: str, commit: str) -> None:
    net = Net()
    offload = {"offload_optimizer": {"device": "cpu"}} if commit == "at_once" else {}
    config = zero(2, zero_optimization={"stage": 2, **offload}, shardwell={"commit": commit, "nonfinite": "skip"})
    engine = shardwell.initialize(model=net, optimizer=SGD(net.parameters(), lr=0.1), config=config).engine
    for value in (0.1, float("nan")):
        engine.optimizer.param_groups[0][name] = value
        engine.backward(engine(torch.ones(2, 4)))
        if value == 0.1:
            engine.step()
    with pytest.raises(shardwell.NonFiniteError) as caught:
        engine.step()
    assert f"{words} of parameter group 0 is nan" in str(caught.value)
    assert ("as before" in str(caught.value)) == bool(torch.isfinite(engine.state_dict()["up.weight"]).all())


def test_a_configuration_is_found_in_arguments_that_are_a_dictionary() -> None:
    config = zero(2, gradient_clipping=0.5)
    engine = shardwell.initialize(args={"deepspeed_config": config}, model=Net(), optimizer=SGD).engine
    assert engine.gradient_clipping() == 0.5


def test_an_optimizer_of_a_file_steps_complex_parameters() -> None:
    """Torch's fused steps are for real numbers only."""
    net = Net(odd=nn.Parameter(torch.ones(3, dtype=torch.complex64) * (1 + 1j)))
    plain = copy.deepcopy(net)
    optimizer = AdamW(plain.parameters(), lr=0.1, weight_decay=0.0)
    config = zero(3, optimizer={"type": "AdamW", "params": {"lr": 0.1}})
    engine = shardwell.initialize(model=net, config=config, device="cpu").engine
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 4)) + (net.odd * (2 - 1j)).abs().square().sum())
        engine.step()
        optimizer.zero_grad()
        (plain(torch.ones(2, 4)) + (plain.odd * (2 - 1j)).abs().square().sum()).backward()
        optimizer.step()
    assert torch.allclose(engine.state_dict()["odd"], plain.odd, atol=1e-6)
