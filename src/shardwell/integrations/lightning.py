"""shardwell as a strategy of Lightning: for `Trainer` and `Fabric`, of `lightning` and of `pytorch_lightning`.

Importing this module registers the names of `STRATEGIES` with every package of the two that is imported already, or
else with those that are installed::

    import lightning as L
    import shardwell.integrations.lightning

    L.Trainer(strategy="shardwell_stage_3", accelerator="gpu", devices=8)

`ShardwellStrategy` takes arguments (`Trainer(strategy=ShardwellStrategy(config="ds.json"))`), and
`ShardwellFabricStrategy` is the same for Fabric.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from shardwell.errors import ShardwellError
from shardwell.integrations.lightning_average import MovingAverageCallback
from shardwell.integrations.lightning_checkpoint import convert_checkpoint, read_checkpoint
from shardwell.integrations.lightning_config import STRATEGIES
from shardwell.integrations.lightning_engine import release
from shardwell.integrations.lightning_fabric import BackwardSync, FabricStrategy
from shardwell.integrations.lightning_precision import FabricPrecision, TrainerPrecision
from shardwell.integrations.lightning_trainer import TrainerStrategy

if TYPE_CHECKING:
    MovingAverage: Any
    ShardwellFabricStrategy: Any
    ShardwellStrategy: Any

__all__ = [
    "STRATEGIES",
    "MovingAverage",
    "ShardwellFabricStrategy",
    "ShardwellStrategy",
    "convert_checkpoint",
    "read_checkpoint",
    "register",
    "release",
    "strategies_of",
]

_ROOTS = {  # of the Trainer and of Fabric
    "lightning": ("lightning.pytorch", "lightning.fabric"),
    "pytorch_lightning": ("pytorch_lightning", "lightning_fabric"),
}
_made: dict[str, SimpleNamespace] = {}


def strategies_of(package: str) -> SimpleNamespace:
    """Return the classes for a package of Lightning: ShardwellStrategy, ShardwellFabricStrategy, MovingAverage."""
    if package not in _ROOTS:
        raise ShardwellError(f"{package!r}: expected one of {', '.join(_ROOTS)}")
    if package not in _made:
        _made[package] = _make(package)
    return _made[package]


def register(package: str | None = None) -> tuple[str, ...]:
    """Register the names of `STRATEGIES` with a package, or with those in use, and return which these are.

    Call it again if the other package is imported later. Names that are registered already stay.
    """
    packages = (package,) if package is not None else _in_use()
    for name in packages:
        classes = strategies_of(name)
        trainer, fabric = _ROOTS[name]
        registries = (
            (import_module(f"{trainer}.strategies").StrategyRegistry, classes.ShardwellStrategy),
            (import_module(f"{fabric}.strategies").STRATEGY_REGISTRY, classes.ShardwellFabricStrategy),
        )
        for registry, strategy in registries:
            for key, (description, arguments) in STRATEGIES.items():
                if key not in registry:
                    registry.register(key, strategy, description=description, **arguments)
    return packages


def _in_use() -> tuple[str, ...]:
    """Return the packages that are imported, or else those that are installed."""
    imported = tuple(name for name, roots in _ROOTS.items() if any(root in sys.modules for root in roots))
    installed = tuple(name for name in _ROOTS if find_spec(name) is not None)
    if not installed:
        raise ShardwellError("neither lightning nor pytorch_lightning is installed: pip install lightning")
    return imported or installed


def _make(package: str) -> SimpleNamespace:
    """Make the classes of a package: Lightning's own with this project's in front."""
    trainer, fabric = _ROOTS[package]
    names = _names(package, trainer, fabric)
    prefix = "" if package == "lightning" else "PytorchLightning"

    def made(name: str, own: type, base: type, **attributes: Any) -> Any:
        qualified = prefix + name  # spawned processes find the class by it
        attributes |= {"__module__": __name__, "__qualname__": qualified, "__doc__": own.__doc__}
        globals()[qualified] = found = type(name, (own, base), attributes)
        return found

    plugins = import_module(f"{trainer}.plugins.precision").Precision
    overridden = staticmethod(names.is_overridden)
    trainer_precision = made("ShardwellPrecision", TrainerPrecision, plugins, is_overridden=overridden)
    trainer_precision.__init__ = _wraps(plugins)
    fabric_plugins = import_module(f"{fabric}.plugins.precision").Precision
    fabric_precision = made("ShardwellFabricPrecision", FabricPrecision, fabric_plugins)
    fabric_precision.__init__ = _wraps(fabric_plugins)
    names.trainer_precision, names.fabric_precision = trainer_precision, fabric_precision
    control = import_module(f"{fabric}.strategies.strategy")._BackwardSyncControl
    names.backward_sync_control = made("ShardwellBackwardSync", BackwardSync, control)()
    ddp = import_module(f"{trainer}.strategies").DDPStrategy
    fabric_ddp = import_module(f"{fabric}.strategies").DDPStrategy
    callback = import_module(f"{trainer}.callbacks").Callback
    return SimpleNamespace(
        ShardwellStrategy=made("ShardwellStrategy", TrainerStrategy, ddp, names=names, strategy_name="shardwell"),
        ShardwellFabricStrategy=made("ShardwellFabricStrategy", FabricStrategy, fabric_ddp, names=names),
        MovingAverage=made("MovingAverage", MovingAverageCallback, callback),
    )


def _wraps(default: type) -> Any:
    """Return a constructor that takes the plugin that Lightning chose; without one it is that of fp32."""

    def construct(self: Any, plugin: Any = None) -> None:
        self._wrap(plugin if plugin is not None else default())

    return construct


def _names(package: str, trainer: str, fabric: str) -> SimpleNamespace:
    """Return what the strategies need of a package, by the names that they use."""
    helpers = import_module(f"{trainer}.utilities.model_helpers")
    modules = import_module(f"{trainer}.core.module")
    return SimpleNamespace(
        package=package,
        version=import_module(trainer).__version__,
        TrainerFn=import_module(f"{trainer}.trainer.states").TrainerFn,
        GradClipAlgorithmType=import_module(f"{trainer}.utilities").GradClipAlgorithmType,
        rank_zero_warn=import_module(f"{trainer}.utilities.rank_zero").rank_zero_warn,
        init_optimizers_and_lr_schedulers=import_module(f"{trainer}.core.optimizer")._init_optimizers_and_lr_schedulers,
        is_overridden=lambda method, module: helpers.is_overridden(method, module, modules.LightningModule),
    )


def __getattr__(name: str) -> Any:
    """Return a class for the package in use; of `lightning` if both are."""
    if name in ("ShardwellStrategy", "ShardwellFabricStrategy", "MovingAverage"):
        return getattr(strategies_of(_in_use()[0]), name)
    if name.startswith("PytorchLightning"):
        strategies_of("pytorch_lightning")
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


register()
