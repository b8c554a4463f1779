"""When updates below the device commit, as the configuration says."""

from __future__ import annotations

from shardwell.config import Config
from shardwell.errors import ConfigError
from shardwell.optim import OptimizerFactory
from shardwell.runtime.precision import is_scaled
from shardwell.sharding.spec import CommitPolicy

_COMMITS = {  # by the words of the configuration
    "at_once": CommitPolicy.IMMEDIATE,
    "after_norm": CommitPolicy.AFTER_NORM,
    "shadow": CommitPolicy.SPECULATIVE,
    "auto": CommitPolicy.AUTO,
}


def settle_commit(settings: Config, factory: OptimizerFactory | None) -> Config:
    """Return the configuration with "after_norm", the only policy for an optimizer whose steps use collectives.

    Each rank decides alone whether a unit can be updated before the norm: it may lack a gradient that other ranks have.
    """
    own = settings.shardwell
    may_go_ahead = own.placement == "auto" or settings.zero_optimization.offload_optimizer.device != "none"
    if factory is None or own.commit == "after_norm" or not may_go_ahead or not factory.is_collective():
        return settings
    if own.commit != "auto":
        raise ConfigError(
            f'shardwell.commit "{own.commit}" is for optimizers that step each element alone. In the steps of this one '
            'ranks meet, and which units can go ahead of the norm may differ between them: use "auto" or "after_norm"'
        )
    told = {"shardwell.commit": 'auto -> "after_norm" (ranks meet in the steps of the optimizer)'}
    chosen = own.model_copy(update={"commit": "after_norm"})
    return settings.with_origins({**settings.origins, **told}, {"shardwell": chosen})


def commit_policy(settings: Config) -> CommitPolicy:
    """Return when updates on the host commit. State on disk has no speculative state in memory.

    "auto" is never immediate where a step may be skipped, because an immediate update cannot be skipped.
    """
    needs = {"gradient_clipping": settings.gradient_clipping > 0, "a loss scale": is_scaled(settings)}
    waits = [name for name, is_on in needs.items() if is_on]
    asked = settings.shardwell.commit
    if asked == "at_once" and waits:
        raise ConfigError(
            f'shardwell.commit "at_once" contradicts {" and ".join(waits)}: the norm of all gradients must be known '
            'before anything is updated; use "auto", "after_norm" or "shadow"'
        )
    if asked == "auto":
        return CommitPolicy.AFTER_NORM if waits or settings.shardwell.nonfinite == "skip" else CommitPolicy.AUTO
    zero = settings.zero_optimization
    on_disk = "nvme" in (zero.offload_optimizer.device, zero.offload_param.device)
    return CommitPolicy.AFTER_NORM if on_disk and asked == "shadow" else _COMMITS[asked]
