"""What else users of Lightning's Trainer do with a strategy: it works as on DDP, or is refused in words."""

from __future__ import annotations

import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, ModelSummary, StochasticWeightAveraging
from torch import Tensor, nn

import shardwell.integrations.lightning as own
from shardwell import ConfigError, ShardwellError
from shardwell.integrations.lightning_config import with_precision as combined
from tests.support import lightning_runs as runs
from tests.support.ranks import Ranks

# A norm of 16-bit gradients is rounded to 16 bits on DDP, and is taken in fp32 here.
PRECISIONS = {"bf16-mixed": 0.02, "bf16-true": 0.02, "64-true": 1e-6}


def with_precision(precision: str) -> dict[str, Any]:
    """The same fit on DDP and at stages 2 and 3, and with autocast alone."""
    options = {"precision": precision, "max_epochs": 1, "gradient_clip_val": 0.5}
    found = {"ddp": runs.fit(None, {}, options)}
    for stage in (2, 3):
        found[str(stage)] = runs.fit({"stage": stage}, {}, options)
    if precision == "bf16-mixed":
        config = {**runs.SHARDED, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
        found["autocast"] = runs.fit({"stage": 3, "config": config}, {}, options)
    return found


@pytest.mark.parametrize("precision", PRECISIONS)
def test_precisions_follow_ddp(ranks: Ranks, precision: str) -> None:
    found = ranks.run(2, with_precision, precision)[0]
    for name, one in found.items():
        tolerance = 1e-5 if name == "autocast" else PRECISIONS[precision]
        for key in ("losses", "norms", "test"):
            np.testing.assert_allclose(one[key], found["ddp"][key], rtol=tolerance, atol=tolerance, err_msg=name)
        for key, value in found["ddp"]["weights"].items():
            np.testing.assert_allclose(one["weights"][key], value, rtol=tolerance, atol=tolerance, err_msg=key)


class Manual(runs.Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        if index == 1:  # gradients that nobody wants
            self.manual_backward(self(batch[0]).sum())
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.losses.append(loss.item())
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class Clipping(runs.Regression):
    """Clips by rules of its own."""

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        value = 0.3 if self.global_step % 2 else 0.1
        self.clip_gradients(optimizer, gradient_clip_val=value, gradient_clip_algorithm="norm")


class Backward(runs.Regression):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (loss * 3).backward(*args, **kwargs)


class Partly(runs.Regression):
    """Trains, and clips by the norm of, some of its parameters."""

    def configure_optimizers(self) -> Any:
        assert self.net is not None
        return torch.optim.SGD(self.net[1:].parameters(), lr=0.1)


def plainly(kind: type[runs.Regression], strategy: Any, **options: Any) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    L.seed_everything(3, verbose=False)
    module = kind()
    run = runs.trainer(strategy, **{"max_epochs": 1, **options})
    run.fit(module, runs.loader())
    found = runs.seen(module, run)
    own.release(module)
    return found


def odd_modules() -> dict[str, Any]:
    found = {}
    for kind in (Manual, Clipping, Backward, Partly, Thawing):
        options: dict[str, Any] = {"gradient_clip_val": 0.2} if kind is Partly else {}
        if kind is Thawing:
            options = {"max_epochs": 3}
        strategies = {
            "ddp": "ddp_find_unused_parameters_true" if kind is Thawing else "ddp",
            "0": runs.strategy_of({"stage": 0}),
            "3": runs.strategy_of({"stage": 3}),
        }
        for name, strategy in strategies.items():
            found[kind.__name__, name] = plainly(kind, strategy, **options)
    return found


@pytest.mark.slow
def test_modules_that_drive_themselves_follow_ddp(ranks: Ranks) -> None:
    found = ranks.run(2, odd_modules)[0]
    for kind in ("Manual", "Clipping", "Backward", "Partly", "Thawing"):
        for stage in ("0", "3"):
            mine, theirs = found[kind, stage], found[kind, "ddp"]
            # DDP keeps adding to gradients of parameters that no optimizer has.
            for key in ("losses",) if kind == "Partly" else ("losses", "norms"):
                np.testing.assert_allclose(mine[key], theirs[key], rtol=1e-5, atol=1e-6, err_msg=f"{kind} {stage}")
            for name, value in theirs["weights"].items():
                np.testing.assert_allclose(mine["weights"][name], value, rtol=1e-5, atol=1e-6, err_msg=f"{kind} {name}")


class Thawing(runs.Regression):
    """Adds a layer to the optimizer after its first steps, as callbacks for fine-tuning do."""

    def configure_optimizers(self) -> Any:
        assert self.net is not None
        self.net[0].requires_grad_(False)
        return torch.optim.SGD(self.net[1:].parameters(), lr=0.1, momentum=0.9)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            assert self.net is not None
            self.net[0].requires_grad_(True)
            self.trainer.optimizers[0].add_param_group({"params": list(self.net[0].parameters()), "lr": 0.01})


class Thawed(BaseFinetuning):
    """The callback that does this; Lightning refuses it with DeepSpeed as well."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        """Unfreeze nothing: the callback is refused before the first epoch."""


class Two(runs.Regression):
    def configure_optimizers(self) -> Any:
        assert self.net is not None
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.net[0], self.net[1])]


class TwoByHand(Two):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Without(runs.Regression):
    def configure_optimizers(self) -> Any:
        return None


def refusals() -> dict[str, str]:
    said = {}
    cases: dict[str, Any] = {
        "two": (Two, {}),
        "two by hand": (TwoByHand, {}),
        "none": (Without, {}),
        "swa": (runs.Regression, {"callbacks": [StochasticWeightAveraging(0.1)]}),
        "ema": (runs.Regression, {"callbacks": [L.pytorch.callbacks.EMAWeightAveraging()]}),
        "thawed": (runs.Regression, {"callbacks": [Thawed()]}),
    }
    for name, (kind, options) in cases.items():
        try:
            plainly(kind, own.ShardwellStrategy(stage=2), **options)
            said[name] = ""
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def test_what_cannot_work_is_refused_with_the_way_out(ranks: Ranks) -> None:
    said = ranks.run(1, refusals)[0]
    assert "only supported with manual optimization" in said["two"]  # by Lightning itself
    assert "found 2" in said["two by hand"]
    assert "parameter groups" in said["two by hand"]
    assert "nothing to train" in said["none"]
    assert "MovingAverage" in said["swa"]
    assert "MovingAverage" in said["ema"]
    assert "add_param_group" in said["thawed"]


def constructed_in_shards(folder: str) -> dict[str, Any]:
    """Stage 3 with `configure_model`, the summary, a monitor of rates, and a second Trainer on the same model."""
    warnings.simplefilter("ignore")
    L.seed_everything(3, verbose=False)
    module = runs.Regression(late=True)
    summary = ModelSummary()
    strategy = own.ShardwellStrategy(stage=3, config=runs.SHARDED)
    run = runs.trainer(strategy, max_epochs=1, callbacks=[summary])
    run.fit(module, runs.loader())
    found = runs.seen(module, run)
    counts = summary._summary(run, module)
    found["counts"] = counts.total_parameters, counts.trainable_parameters
    other = runs.trainer(own.ShardwellStrategy(stage=1), max_epochs=1)
    found["tested"] = other.test(module, runs.loader(16), verbose=False)[0]["test"]
    other.fit(module, runs.loader())
    found["engine stage"] = other.strategy.engine.zero_optimization_stage()
    own.release(module)
    found["whole"] = all(type(p) is nn.Parameter and p.numel() for p in module.parameters())
    return found


def test_a_model_is_built_in_shards_and_handed_on(ranks: Ranks, tmp_path: Path) -> None:
    mine = ranks.run(2, constructed_in_shards, str(tmp_path))[0]
    theirs = ranks.run(2, runs.fit, None, {"late": True}, {"max_epochs": 1})[0]
    np.testing.assert_allclose(mine["losses"][:5], theirs["losses"][:5], rtol=1e-5)
    for name, value in theirs["weights"].items():
        np.testing.assert_allclose(mine["weights"][name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    assert mine["counts"] == (820, 820)
    assert mine["tested"] == pytest.approx(theirs["test"], rel=1e-5)
    assert mine["engine stage"] == 1
    assert mine["whole"]


def averaged(folder: str) -> dict[str, Any]:
    """An average of the weights, saved and resumed, beside Lightning's own on DDP."""
    warnings.simplefilter("ignore")
    found = {}
    for name, strategy, callback in (
        ("ddp", "ddp", L.pytorch.callbacks.EMAWeightAveraging(decay=0.9)),
        ("mine", own.ShardwellStrategy(stage=3, config=runs.SHARDED), own.MovingAverage(decay=0.9)),
    ):
        L.seed_everything(3, verbose=False)
        module = runs.Regression()
        run = runs.trainer(strategy, max_epochs=1, callbacks=[callback])
        run.fit(module, runs.loader(), runs.loader(16))
        found[name] = {**runs.seen(module, run), "val": float(run.callback_metrics["val"])}
        own.release(module)
    return found


def test_an_average_of_the_weights_equals_lightnings(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(2, averaged, str(tmp_path))[0]
    assert found["mine"]["val"] == pytest.approx(found["ddp"]["val"], rel=1e-5)
    for name, value in found["ddp"]["weights"].items():
        np.testing.assert_allclose(found["mine"]["weights"][name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_arguments_and_configurations_that_contradict_are_refused() -> None:
    with pytest.raises(ConfigError, match="keep one"):
        own.ShardwellStrategy(stage=2, config={"zero_optimization": {"stage": 3}})
    with pytest.raises(ConfigError, match="accumulate_grad_batches=4"):
        own.ShardwellStrategy(config={"gradient_accumulation_steps": 4})
    with pytest.raises(TypeError, match="find_unused_parameters"):
        own.ShardwellStrategy(find_unused_parameters=True)
    strategy = own.ShardwellStrategy(stage=2, config={"fp16": {"enabled": True}})
    with pytest.raises(ConfigError, match="contradicts precision"):
        combined(strategy.config, "bf16-mixed")
    with pytest.raises(ShardwellError, match="no engine yet"):
        _ = strategy.engine


def test_the_loss_scale_begins_and_grows_as_lightnings_scaler() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=50)
    block = combined({}, "16-mixed", scaler)["fp16"]
    assert block == {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 50, "hysteresis": 1}
    with pytest.raises(ConfigError, match="power of two"):
        combined({}, "16-mixed", torch.amp.GradScaler("cpu", init_scale=1000.0))


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_names_are_registered_for_trainer_and_fabric(package: str) -> None:
    assert own.register(package) == (package,)
    is_one = package == "lightning"
    trainer = import_module("lightning.pytorch.strategies" if is_one else "pytorch_lightning.strategies")
    fabric = import_module("lightning.fabric.strategies" if is_one else "lightning_fabric.strategies")
    stages = [f"shardwell_stage_{name}" for name in ("0", "1", "2", "3", "2_offload", "3_offload")]
    for name in (*stages, "shardwell_infinity"):
        assert name in trainer.StrategyRegistry
        assert name in fabric.STRATEGY_REGISTRY
    made = own.strategies_of(package)
    assert issubclass(made.ShardwellStrategy, trainer.DDPStrategy)
    assert issubclass(made.ShardwellFabricStrategy, fabric.DDPStrategy)
