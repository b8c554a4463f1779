"""One rank of `shardwell train`: builds the model, trains, evaluates, saves, exports. Rank 0 prints.

`shardwell train` starts it on every rank with the recipe as JSON. `shardwell run -n 8 -m shardwell.train.rank RECIPE`
and torchrun do the same with the path of a recipe.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardwell
from shardwell.config import load
from shardwell.config.source import read
from shardwell.memory.local_gpus import default_device
from shardwell.monitor.numbers import plural, short
from shardwell.parallel import start_process_group
from shardwell.train import models
from shardwell.train.export import export
from shardwell.train.memory_choice import choose
from shardwell.train.recipe import Recipe, check_same_run, keep_recipe, read_recipe
from shardwell.train.rows import IGNORED, Rows, opened, prepare

_GATHERED = 1 << 31  # bytes of a model that is unsharded as a whole to write a sample


def train(recipe: Recipe) -> dict[str, Any]:
    """Train as a recipe says, and return the last losses and what was written. All ranks call it."""
    device = default_device()
    start_process_group(device)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    output = Path(recipe.output)
    check_same_run(recipe, output)
    tokenizer = models.make_tokenizer(recipe)
    rows, held_out = (_rows(paths, recipe, tokenizer, output, rank) for paths in (recipe.data, recipe.eval_data))
    assert rows is not None  # all ranks have met since they read the recipe of an earlier run
    if rank == 0:
        keep_recipe(recipe, output)
    steps = _num_steps(recipe, len(rows), num_ranks)
    per_step = recipe.micro_batch * recipe.accumulation * num_ranks
    words = f"data: {plural(len(rows), 'row')} of {recipe.sequence_length} tokens; {plural(steps, 'step')} of"
    _say(rank, f"{words} {plural(per_step, 'row')}, epochs: {short(steps * per_step / len(rows))}")
    is_narrow = recipe.precision == "bf16" or (recipe.precision == "auto" and device.type == "cuda")
    config, recomputes = _config(recipe, tokenizer, steps, num_ranks, torch.bfloat16 if is_narrow else None, rank)
    engine = _engine(recipe, tokenizer, config, rows, torch.bfloat16 if is_narrow else torch.float32, recomputes)
    if engine.monitor is not None:
        engine.monitor.total_steps = steps
    resumed = engine.load_checkpoint(output / "checkpoints")[0] if _may_resume(recipe, output) else None
    _say(rank, f"resumed at step {engine.global_steps}: {resumed}" if resumed else "")
    if engine.global_steps >= steps:
        _say(rank, f"all {steps} steps are done: --steps N for more, or another --output to begin anew")
    if not resumed:
        _samples(engine, tokenizer, recipe, "before")
    found = _loop(engine, recipe, steps, held_out)
    if not (output / "checkpoints" / f"global_step{engine.global_steps}").exists():
        engine.save_checkpoint(output / "checkpoints")
    engine.finish_saving()
    _samples(engine, tokenizer, recipe, "after")
    if recipe.export:
        found["model"] = str(export(recipe, output, tokenizer, is_first=rank == 0))
        dist.barrier()
        _say(rank, f"exported: {found['model']}")
    engine.destroy(whole=False)
    return found


def _loop(engine: Any, recipe: Recipe, steps: int, held_out: Rows | None) -> dict[str, Any]:
    """Train up to the last step; evaluate and save when that is due."""
    batches = _forever(engine.training_dataloader)
    found: dict[str, Any] = {"loss": None, "eval_loss": None}
    while engine.global_steps < steps:
        micro_batches = list(itertools.islice(batches, engine.gradient_accumulation_steps()))
        share = _tokens_per_micro_batch(micro_batches, engine)
        for batch in micro_batches:
            loss = engine(**batch, num_items_in_batch=share).loss
            engine.backward(loss)
            engine.step()
        found["loss"] = loss.detach()
        step = engine.global_steps
        if held_out is not None and (step == steps or (recipe.eval_every and step % recipe.eval_every == 0)):
            found["eval_loss"] = evaluate(engine, held_out, recipe.micro_batch)
        if recipe.save_every and step % recipe.save_every == 0:
            engine.save_checkpoint(Path(recipe.output, "checkpoints"))
    found["loss"] = None if found["loss"] is None else float(found["loss"])
    return found


def _forever(loader: Any) -> Iterator[dict[str, Any]]:
    """Yield batches of one epoch after the other; the loader knows its place, also after a checkpoint was loaded."""
    while True:
        yield from loader


def _tokens_per_micro_batch(batches: list[dict[str, Any]], engine: Any) -> torch.Tensor:
    """Return the tokens that are trained on in this step, of all ranks, divided by the number of micro-batches.

    Each loss is a sum divided by this, and gradients are averaged over micro-batches and ranks: so every token of the
    step has the same weight, wherever it is.
    """
    own = sum((batch["labels"][:, 1:] != IGNORED).sum() for batch in batches)
    count = torch.as_tensor(own, device=engine.device, dtype=torch.float32).clone()
    dist.all_reduce(count)
    share: torch.Tensor = count.clamp(min=1.0) / (len(batches) * engine.world_size)
    return share


@torch.no_grad()
def evaluate(engine: Any, rows: Rows, micro_batch: int) -> float:
    """Return the mean loss of a token over some rows, which the ranks share; rank 0 prints it."""
    engine.eval()
    rank, num_ranks = engine.global_rank, engine.world_size
    sums = torch.zeros(2, dtype=torch.float64, device=engine.device)
    per_rank = -(-len(rows) // num_ranks)
    for begin in range(0, per_rank, micro_batch):  # all ranks run the same number of forwards
        numbers = range(begin * num_ranks + rank, min((begin + micro_batch) * num_ranks, len(rows)), num_ranks)
        mine = [rows[number] for number in numbers] or [_blank(rows[0])]
        batch = {name: torch.stack([row[name] for row in mine]).to(engine.device) for name in mine[0]}
        one = torch.ones((), device=engine.device)
        total = engine(**batch, num_items_in_batch=one).loss
        count = (batch["labels"][:, 1:] != IGNORED).sum()
        sums += torch.stack([torch.where(count > 0, total, 0.0).double(), count.double()])
    dist.all_reduce(sums)
    engine.train()
    loss = float(sums[0] / sums[1].clamp(min=1.0))
    _say(rank, f"step {engine.global_steps}  eval loss {loss:.4g}  perplexity {math.exp(min(loss, 700.0)):.4g}")
    if engine.monitor is not None:
        engine.monitor.write_events([("Eval/Samples/loss", loss, engine.global_samples)])
    return loss


def _blank(row: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a row without labels, for a rank that has none left."""
    return {**row, "labels": torch.full_like(row["labels"], IGNORED)}


def _rows(paths: list[str], recipe: Recipe, tokenizer: Any, output: Path, rank: int) -> Rows | None:
    """Return the rows of some files; rank 0 makes them."""
    if not paths:
        return None
    options: dict[str, Any] = {"packing": recipe.packing, "text_field": recipe.text_field}
    length = recipe.sequence_length
    if rank == 0:
        prepare(paths, tokenizer, output, length, **options, writes=True)
    dist.barrier()
    place = prepare(paths, tokenizer, output, length, **options, writes=False)
    return opened(place, length, tokenizer.pad_token_id)


def _num_steps(recipe: Recipe, num_rows: int, num_ranks: int) -> int:
    per_step = recipe.micro_batch * recipe.accumulation * num_ranks
    if num_rows < recipe.micro_batch * num_ranks:
        raise shardwell.ShardwellError(
            f"the data gives {num_rows} rows of {recipe.sequence_length} tokens, fewer than one micro-batch of "
            f"{recipe.micro_batch} x {num_ranks} ranks: use a shorter sequence_length, or more data"
        )
    return recipe.steps or max(1, int(recipe.epochs * num_rows / per_step))


def _config(
    recipe: Recipe, tokenizer: Any, steps: int, num_ranks: int, mixed: torch.dtype | None, rank: int
) -> tuple[dict[str, Any], bool]:
    """Return the configuration of the engine, and whether blocks are recomputed."""
    warmup = max(1, round(0.03 * steps)) if recipe.warmup_steps is None else recipe.warmup_steps
    kinds: dict[str, dict[str, Any]] = {
        "cosine": {"type": "WarmupCosineLR", "params": {"total_num_steps": steps, "warmup_num_steps": warmup}},
        "linear": {"type": "WarmupDecayLR", "params": {"total_num_steps": steps, "warmup_num_steps": warmup}},
        "constant": {"type": "WarmupLR", "params": {"warmup_num_steps": warmup}},
    }
    schedule = kinds[recipe.schedule]
    schedule["params"]["warmup_type"] = "linear"
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": recipe.micro_batch,
        "gradient_accumulation_steps": recipe.accumulation,
        "gradient_clipping": recipe.clip,
        "optimizer": {"type": "AdamW", "params": {"lr": recipe.rate, "weight_decay": recipe.weight_decay}},
        "scheduler": schedule,
        "bf16": {"enabled": mixed is torch.bfloat16},
        "steps_per_print": recipe.log_every,
        "shardwell": {"keep_last": recipe.keep_last},
        "zero_optimization": {"stage": 3 if num_ranks > 1 else 0},
    }
    recomputes = bool(recipe.checkpoint_activations)
    if recipe.memory is not None:
        empty = models.empty_model(recipe, models.model_config(recipe, tokenizer))
        choice = choose(recipe, empty, num_ranks, mixed)
        _say(rank, str(choice))
        config["zero_optimization"], recomputes = choice.zero(recipe.nvme_path), choice.way.recomputes
    if recipe.config is not None:
        given = recipe.config if isinstance(recipe.config, dict) else read(recipe.config)[2]
        config = {**config, **given}  # block by block: what a file says is what the user means
    return config, recomputes


def _engine(
    recipe: Recipe, tokenizer: Any, config: dict[str, Any], rows: Rows, dtype: torch.dtype, recomputes: bool
) -> Any:
    is_sharded = load(config, world_size=dist.get_world_size()).zero_optimization.stage == 3
    with shardwell.zero.Init(config=config, enabled=is_sharded):
        model = models.make_model(recipe, models.model_config(recipe, tokenizer), dtype)
    model = models.adapt(model, recipe, recomputes=recomputes).train()
    return shardwell.initialize(model=model, config=config, training_data=rows).engine


def _may_resume(recipe: Recipe, output: Path) -> bool:
    return recipe.resume and any((output / "checkpoints").glob("*/manifest.json"))


@torch.no_grad()
def _samples(engine: Any, tokenizer: Any, recipe: Recipe, when: str) -> None:
    """Print what the model writes after each prompt. All ranks run the model, since its parameters are sharded."""
    if not recipe.prompts:
        return
    model = engine.module.eval()
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    whole = shardwell.zero.GatheredParameters(model.parameters(), enabled=size <= _GATHERED)
    with whole:
        for prompt in recipe.prompts:
            tokens = tokenizer(prompt, return_tensors="pt")["input_ids"].to(engine.device)
            options = {"max_new_tokens": recipe.sample_tokens, "do_sample": False, "use_cache": True}
            written = model.generate(input_ids=tokens, pad_token_id=tokenizer.pad_token_id, **options)
            _say(engine.global_rank, f"{when}: {tokenizer.decode(written[0], skip_special_tokens=True)!r}")
    engine.train()


def _say(rank: int, text: str) -> None:
    if rank == 0 and text:
        print(text, flush=True)


def main() -> None:
    """Train the recipe that the first argument is: a path, or JSON."""
    given = sys.argv[1]
    train(read_recipe(None, json.loads(given)) if given.lstrip().startswith("{") else read_recipe(given, {}))


if __name__ == "__main__":
    main()
