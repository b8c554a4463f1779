"""Train with shardwell under Ray Train: checkpoints, restarts after a failure, and a later run that goes on.

    python examples/ray_train.py --workers 2 --storage /shared/runs --steps 20
    python examples/ray_train.py --workers 3 --storage /shared/runs --steps 40 --resume /shared/runs/shards

Ray starts the workers and their process group; `shardwell.initialize` joins it. All workers write the shards of a
checkpoint, so `--storage` must be a folder that all nodes see.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import shardwell

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.0}},
    "gradient_clipping": 1.0,
}


def batch(step: int, worker: int, workers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This worker's part of the batch of a step, whatever the number of workers."""
    drawn = torch.Generator().manual_seed(step)
    x = torch.randn(12, 8, generator=drawn)
    return x[worker::workers], (x @ torch.linspace(-1, 1, 8)).unsqueeze(1)[worker::workers]


def train(settings: dict[str, Any]) -> None:
    """Run in each worker: train up to a step, and save a checkpoint every few steps."""
    context = ray.train.get_context()
    rank, workers = context.get_world_rank(), context.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    engine, *_ = shardwell.initialize(model=model, config=CONFIG)
    found = ray.train.get_checkpoint()  # after a failure of this run: its last report
    if found is not None:
        engine.load_checkpoint(found.path, strict=True)
    elif settings["resume"]:  # a new run that goes on from an older one
        engine.load_checkpoint(settings["resume"], strict=True)
    while engine.global_steps < settings["steps"]:
        step = engine.global_steps
        x, y = batch(step, rank, workers)
        loss = torch.nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        metrics = {"step": engine.global_steps, "loss": loss.item(), "norm": engine.get_global_grad_norm()}
        if engine.global_steps % settings["save_every"] and engine.global_steps < settings["steps"]:
            ray.train.report(metrics)
        else:
            engine.save_checkpoint(settings["shards"])  # all workers write their shards
            ray.train.report(metrics, checkpoint=Checkpoint(settings["shards"]) if rank == 0 else None)
        if settings.get("fails_at") == engine.global_steps and found is None and rank == 0:
            raise RuntimeError("this worker was told to fail once")


def main() -> None:
    """Start the workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--storage", type=Path, required=True, help="a folder that all nodes see")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--resume", default="", help="a folder of checkpoints to go on from")
    parser.add_argument("--fails-at", type=int, default=-1, help="let a worker fail once after this step")
    parser.add_argument("--gpus", action="store_true", help="one GPU for each worker")
    given = parser.parse_args()
    storage = given.storage.resolve()
    trainer = TorchTrainer(
        train,
        train_loop_config={
            "steps": given.steps,
            "save_every": given.save_every,
            "shards": str(storage / "shards"),
            "resume": given.resume,  # Ray Train refuses resume_from_checkpoint: the path is handed over
            "fails_at": given.fails_at,
        },
        scaling_config=ScalingConfig(num_workers=given.workers, use_gpu=given.gpus),
        run_config=RunConfig(
            name="shardwell",
            storage_path=str(storage / "ray"),
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(num_to_keep=1),
        ),
    )
    result = trainer.fit()
    print(f"step {result.metrics['step']} loss {result.metrics['loss']:.9g} norm {result.metrics['norm']:.9g}")


if __name__ == "__main__":
    main()
