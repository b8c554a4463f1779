"""A LightningModule and loops of Trainer and Fabric in ranks, on DDP or on a shardwell strategy, with what they saw."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shardwell.integrations.lightning as own

SAMPLES, BATCH = 44, 4
SHARDED = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}  # also small parameters


def samples(count: int = SAMPLES) -> TensorDataset:
    drawn = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 8, generator=drawn), torch.randn(count, 4, generator=drawn))


def loader(count: int = SAMPLES) -> DataLoader[Any]:
    return DataLoader(samples(count), batch_size=BATCH)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inside(self.norm(x)))


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), *(Block() for _ in range(2)), nn.Linear(16, 4))


class Regression(L.LightningModule):
    """Remembers its losses, and the norm of its gradients before each step."""

    def __init__(self, lr: float = 0.05, schedule: str = "", optimizer: str = "sgd", late: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net: nn.Sequential | None = None if late else network()
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.rates: list[float] = []

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(7)
            self.net = network()

    def forward(self, x: Tensor) -> Tensor:
        assert self.net is not None
        return self.net(x)

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [torch.linalg.vector_norm(p.grad) for p in self.parameters() if p.grad is not None]
        self.norms.append(torch.linalg.vector_norm(torch.stack(norms)).item() if norms else 0.0)
        self.rates.append(optimizer.param_groups[0]["lr"])

    def validation_step(self, batch: Any, index: int) -> None:
        x, y = batch
        self.log("val", nn.functional.mse_loss(self(x), y), sync_dist=True)

    def test_step(self, batch: Any, index: int) -> None:
        x, y = batch
        self.log("test", nn.functional.mse_loss(self(x), y), sync_dist=True)

    def predict_step(self, batch: Any, index: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        lr, kind = self.hparams["lr"], self.hparams["schedule"]
        optimizer: torch.optim.Optimizer
        if self.hparams["optimizer"] == "sgd":
            optimizer = torch.optim.SGD(self.parameters(), lr=lr, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(self.parameters(), lr=lr)
        if kind == "step":
            found: Any = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7), "interval": "step"}
        elif kind == "epoch":
            found = {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), "interval": "epoch"}
        elif kind == "plateau":
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "min", 0.1, patience=0, threshold=1.0)
            found = {"scheduler": schedule, "monitor": "val"}
        else:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": found}


def trainer(strategy: Any, **options: Any) -> L.Trainer:
    """A Trainer in a rank of the pool, whose process group is there already."""
    given: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 2,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
        **options,
    }
    return L.Trainer(strategy=strategy, devices=dist.get_world_size(), plugins=[LightningEnvironment()], **given)


def strategy_of(arguments: dict[str, Any] | None) -> Any:
    """DDP, or a strategy with these arguments whose small parameters are sharded, too."""
    return "ddp" if arguments is None else own.ShardwellStrategy(**{"config": SHARDED, **arguments})


def seen(model: Regression, run: L.Trainer) -> dict[str, Any]:
    state = dict(run.strategy.lightning_module_state_dict())
    return {
        "losses": model.losses,
        "norms": model.norms,
        "rates": model.rates,
        "weights": {key: value.float() for key, value in state.items()},
        "steps": run.global_step,
    }


def fit(arguments: dict[str, Any] | None, model: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Train, validate in between, and test; return what was seen."""
    warnings.simplefilter("ignore")
    L.seed_everything(3, verbose=False)
    module = Regression(**model)
    run = trainer(strategy_of(arguments), **options)
    run.fit(module, loader(), loader(16))
    found = seen(module, run)
    found["val"] = float(run.callback_metrics["val"])
    found["test"] = run.test(module, loader(16), verbose=False)[0]["test"]
    own.release(module)
    return found


def leg(arguments: dict[str, Any] | None, epochs: int, save: str | None, resume: str | None) -> dict[str, Any]:
    """Train up to an epoch, from a checkpoint or from the start, and save one."""
    warnings.simplefilter("ignore")
    L.seed_everything(3, verbose=False)
    module = Regression(schedule="step")
    run = trainer(strategy_of(arguments), max_epochs=epochs)
    run.fit(module, loader(48), ckpt_path=resume, weights_only=False)
    if save is not None:
        run.save_checkpoint(save)
    found = seen(module, run)
    own.release(module)
    return found
