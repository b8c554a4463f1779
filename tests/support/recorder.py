"""The recorder shows that a refactoring keeps bits: it trains a tiny model in many ways and writes down what came out.

    python -m tests.support.recorder --write FILE.json      records this tree
    python -m tests.support.recorder --compare FILE.json    records again, names all that differs, and exits with 1

`--only SUBSTRING` chooses cases by their names, `--list` prints the names, `--jobs N` uses N pools of ranks at once.

It uses what is public and the pool of ranks, nothing else of the tree, so that this folder can be copied into another
version and run there. Bits depend on the machine and on torch: compare only what one machine recorded.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import random
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")  # as in tests/conftest.py
os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks inherit both

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import shardwell
from shardwell.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from tests.support.patience import soon
from tests.support.ranks import RankFailedError, Ranks
from tests.support.recorder_cases import Case, all_cases, num_ranks, ranks_of_a_node

STEPS, SAVED_AFTER = 4, 2
WIDTH, INNER, WORDS, BLOCKS = 32, 40, 37, 3  # sizes that three ranks do not divide
BATCH, LENGTH = 2, 4
SMALLER = 0.1  # logits are scaled such that some gradient norms are above what is clipped, and some below
LIMIT, START_LIMIT = 120.0, 600.0  # seconds for a case, and for ranks to start on a busy machine

Record = dict[str, Any]

# --- the model and its configuration -----------------------------------------------------------------------------


class Block(nn.Module):
    """Two linears around an activation and a dropout, after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.gelu(self.up(self.norm(x)))
        return x + self.down(functional.dropout(inner, 0.1, self.training))


class Model(nn.Module):
    """An embedding whose weight is also the head, blocks, and a norm."""

    def __init__(self, recompute: str) -> None:
        super().__init__()
        self.recompute = recompute
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            if self.recompute == "torch":
                x = torch_checkpoint(block, x, use_reentrant=False)
            elif self.recompute == "own":
                x = shardwell.checkpointing.checkpoint(block, x)
            else:
                x = block(x)
        logits = SMALLER * self.head(self.norm(x)).float()
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
    "adamw8": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
    "sgd": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
    "lamb": {"type": "Lamb", "params": {"lr": 0.01, "weight_decay": 0.1}},
    "muon": {"type": "Muon", "params": {"lr": 0.01}},
}
WARMUP = {"warmup_min_lr": 0.001, "warmup_num_steps": 3, "warmup_type": "linear"}
STATES = ("step", "exp_avg", "exp_avg_sq", "momentum_buffer")  # of all of these


def config_of(case: Case, folder: str) -> dict[str, Any]:
    """The configuration of a case; what rests on disk does so in the folder."""
    zero: dict[str, Any] = {"stage": int(case["stage"])}
    own: dict[str, Any] = {"commit": case["commit"]}
    below, _, params = case["tier"].partition("+")
    if below != "device":
        place = {"device": "cpu"} if below == "host" else {"device": "nvme", "nvme_path": folder}
        zero["offload_optimizer"] = place
        if params:
            zero["offload_param"] = place | ({"max_in_cpu": 0} if below == "nvme" else {})
    if case["optimizer"] == "adamw8":
        own["moments"] = "8bit"
    if case["stage"] == "3":
        zero["stage3_param_persistence_threshold"] = 100 if case["small"] == "whole" else 0
        own["shard_at_world_one"] = case["small"] == "split"
    if case["zeropp"] in ("hpz", "all"):
        zero["zero_hpz_partition_size"] = ranks_of_a_node(case)
    if case["zeropp"] in ("weights", "all"):
        zero["zero_quantized_weights"] = True
    if case["frozen"] == "coded":
        zero["zero_quantized_nontrainable_weights"] = True
    if case["zeropp"] in ("gradients", "all"):
        zero["zero_quantized_gradients"] = True
    found = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": int(case["accumulation"]),
        "gradient_clipping": 0.0 if case["clipping"] == "off" else float(case["clipping"]),
        "zero_optimization": zero,
        "optimizer": OPTIMIZERS[case["optimizer"]],
        "scheduler": {"type": "WarmupLR", "params": WARMUP},
        "activation_checkpointing": {"cpu_checkpointing": case["recompute"] == "own"},
        "shardwell": own,
    }
    if case["precision"] == "bf16":
        found["bf16"] = {"enabled": True}
    if case["precision"] == "fp16":  # one of the steps overflows
        found["fp16"] = {"enabled": True, "initial_scale_power": 18, "hysteresis": 1, "loss_scale_window": 2}
    return found


# --- on a rank ----------------------------------------------------------------------------------------------------


def ready() -> str:
    """Ranks that answer have imported all that they need."""
    return shardwell.__version__


def train(case: Case, folder: str, first: int, last: int) -> Record:
    """Train from the first step to the last on this rank, and tell what happened; an error is told, too.

    What begins later than step 0 is loaded from the folder, and what ends before `STEPS` is saved there.
    """
    rank = int(os.environ["RANK"])
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks_of_a_node(case))
    os.environ["LOCAL_RANK"] = str(rank % ranks_of_a_node(case))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _trained(case, folder, rank, range(first, last))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {first_sentence(str(error).replace(folder, 'FOLDER'))}"}


def first_sentence(text: str) -> str:
    """Up to the first full stop or the end of the line: what comes after may hold places and numbers."""
    return re.split(r"(?<=[.!?])\s|\n", text.strip(), maxsplit=1)[0]


def _trained(case: Case, folder: str, rank: int, steps: range) -> Record:
    _seed(0)
    config = config_of(case, folder)
    birth = shardwell.zero.Init(config=config) if case["birth"] == "sharded" else contextlib.nullcontext()
    with birth:
        model = Model(case["recompute"])
    if case["frozen"] != "none":
        model.blocks[1].requires_grad_(False)
        model.blocks[0].up.bias.requires_grad_(False)
    engine = shardwell.initialize(model=model, config=config)[0]
    if steps.start:
        engine.load_checkpoint(folder)
    _seed(1 + rank)  # of the dropouts
    found = [_step(engine, case, rank, step) for step in steps]
    record: Record = {key: [one[key] for one in found] for key in found[0]}
    if "nvme" not in case["tier"]:  # updates may still be on their way to the drives
        record["memory"] = memory_of(engine, case)
    if steps.stop < STEPS:
        engine.save_checkpoint(folder)
    record |= _digests(engine)
    record["memory after reading"] = memory_of(engine, case)
    engine.destroy()
    return record


def _seed(seed: int) -> None:
    """Seed all random states that a checkpoint holds: they are in its text, whose bytes are counted as traffic."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def _step(engine: Any, case: Case, rank: int, step: int) -> Record:
    """One optimizer step, and all that the engine tells of it."""
    losses = []
    with engine.record() as trace:
        for micro in range(engine.gradient_accumulation_steps()):
            drawing = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
            words = torch.randint(WORDS, (BATCH, LENGTH + 1), generator=drawing)
            loss = engine(words[:, :-1], words[:, 1:])
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()).hex())
    norm = engine.get_global_grad_norm()
    return {
        "losses": losses,
        "norm": None if norm is None else norm.hex(),
        "trace": trace_of(str(trace), case),
        "traffic": traffic_of(engine),
        "scale": [float(engine.loss_scale).hex(), engine.skipped_steps],
        "rates": [float(rate).hex() for rate in engine.get_lr()],
    }


def trace_of(text: str, case: Case) -> str:
    """The trace, as far as it is the same in each run.

    Parameters on disk are read as far ahead as the measured pace of the drives says (D), and are gathered ahead (G) if
    they have come by then. Of such traces the order of all other tokens stays, and how often each unit is gathered.
    """
    if case["tier"] != "nvme+params":
        return text
    events, _, legend = text.partition("\n")
    kept = [event for event in events.split() if event[0] not in "DG"]
    gathers = Counter(event for event in events.split() if event[0] == "G")
    return "\n".join([" ".join(kept), " ".join(f"{count}x{event}" for event, count in sorted(gathers.items())), legend])


def traffic_of(engine: Any) -> dict[str, int]:
    """Bytes by collective and by how far they came, and calls by collective."""
    report = engine.traffic()
    received = {f"{kind.value} {hop}": size for (kind, hop), size in report.received.items() if size}
    return received | {f"{kind.value} calls": calls for kind, calls in report.calls.items() if calls}


def memory_of(engine: Any, case: Case) -> dict[str, int]:
    """Bytes by state and tier, now and at the peak, as far as they are the same in each run.

    What is on its way from and to drives is in slots of host memory, and how many of them are in use at once depends on
    how fast the drives are; so does when most memory is in use, since gradients wait for slots.
    """
    report = engine.memory()
    sums: Counter[str] = Counter()
    for when, books in (("now", report.now), ("at peak", report.peak)):
        for (state, _, tier), size in books.items():
            sums[f"{state.value} {tier.value} {when}"] += size
    if "nvme" in case["tier"]:
        sums = Counter({key: sums[key] for key in sums if key.endswith("now") and not key.startswith("staging host")})
    return dict(sorted(sums.items()))


def _digests(engine: Any) -> Record:
    """One digest of all masters, one of the optimizer's state, one of the model's state."""
    model = engine.module
    masters, states = hashlib.sha256(), hashlib.sha256()
    for name, parameter in model.named_parameters():
        _feed(masters, name, safe_get_full_fp32_param(parameter))
        if parameter.requires_grad:
            for key in STATES:
                _feed(states, f"{name} {key}", safe_get_full_optimizer_state(parameter, key))
    whole = hashlib.sha256()
    for name, value in engine.state_dict().items():
        _feed(whole, name, value)
    return {"masters": masters.hexdigest(), "state": states.hexdigest(), "model": whole.hexdigest()}


def _feed(digest: Any, name: str, value: Any) -> None:
    """Put a name, and a tensor's dtype, shape and bytes, or a number, into a digest."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    else:
        digest.update(f"{name} {value!r}\n".encode())


# --- recording and comparing ---------------------------------------------------------------------------------------


def record_case(pool: Ranks, parts: tuple[Case, ...]) -> Record:
    """What each rank told, by part and field; where all ranks told the same it is there once."""
    found: Record = {}
    with tempfile.TemporaryDirectory(prefix="recorder-") as folder:
        for number, case in enumerate(parts):
            first = SAVED_AFTER if number else 0
            last = SAVED_AFTER if number + 1 < len(parts) else STEPS
            try:
                told = pool.run(num_ranks(case), train, case, folder, first, last, limit=soon(LIMIT))
            except RankFailedError as error:  # a rank that hangs, dies, or drops what it began
                told = [{"error": f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"}]
            prefix = "resumed " if number else ""
            for field in {field: None for one in told for field in one}:
                values = [one.get(field) for one in told]
                same = all(value == values[0] for value in values)
                found[prefix + field] = {"all": values[0]} if same else dict(enumerate_as_text(values))
    return cast(Record, json.loads(json.dumps(found)))


def enumerate_as_text(values: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"rank {number}", value) for number, value in enumerate(values))


def record_all(chosen: Mapping[str, tuple[Case, ...]], jobs: int = 1) -> dict[str, Record]:
    """Record all these cases, on so many pools of ranks at once."""
    pools: SimpleQueue[Ranks] = SimpleQueue()
    made = [Ranks() for _ in range(jobs)]
    for pool in made:
        pools.put(pool)

    def one(item: tuple[str, tuple[Case, ...]]) -> Record:
        pool = pools.get()
        begin = time.monotonic()
        try:
            found = record_case(pool, item[1])
        finally:
            pools.put(pool)
        said = "".join(f"  {field}: {value}" for field, value in found.items() if field.endswith("error"))
        print(f"{time.monotonic() - begin:5.1f} s  {item[0]}{said}", file=sys.stderr, flush=True)
        return found

    try:
        for pool in made:
            pool.run(max(num_ranks(case) for parts in chosen.values() for case in parts), ready, limit=START_LIMIT)
        with ThreadPoolExecutor(jobs) as threads:
            return dict(zip(chosen, threads.map(one, chosen.items()), strict=True))
    finally:
        for pool in made:
            pool.close()


def differences(before: Any, after: Any, where: str = "") -> Iterator[str]:
    """A line for each place where two records differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in {**before, **after}:
            yield from differences(before.get(key), after.get(key), f"{where} > {key}" if where else key)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from differences(one, other, f"{where}[{number}]")
    elif before != after:
        yield f"{where}: {_short(before)} -> {_short(after)}"


def _short(value: Any) -> str:
    words = json.dumps(value)
    return words if len(words) <= 300 else f"{words[:300]}..."


def circumstances() -> dict[str, str]:
    """What bits depend on besides the tree."""
    cpu = torch.backends.cpu.get_cpu_capability()
    return {"torch": torch.__version__, "machine": platform.machine(), "cpu": cpu, "python": platform.python_version()}


def compare(before: dict[str, Any], after: dict[str, Any], chosen: Iterable[str]) -> list[str]:
    """The lines that name each case and field that differs, among the chosen cases."""
    lines = list(differences(before["circumstances"], after["circumstances"], "circumstances"))
    for name in chosen:
        lines.extend(differences(before["cases"].get(name), after["cases"].get(name), name))
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.recorder", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE", help="record this tree")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="record again, and compare")
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="cases whose name has this in it")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--jobs", type=int, default=1, help="pools of ranks at once")
    options = parser.parse_args(arguments)
    chosen = {name: parts for name, parts in all_cases().items() if options.only in name}
    if options.list:
        print("\n".join(chosen))
        return 0
    if options.write is None and options.compare is None:
        parser.error("say --write FILE, --compare FILE or --list")
    before = json.loads(options.compare.read_text()) if options.compare is not None else None
    after = {"circumstances": circumstances(), "cases": record_all(chosen, options.jobs)}
    if options.write is not None:
        options.write.write_text(json.dumps(after, indent=1) + "\n")
    if before is None:
        return 0
    names = {name: None for name in (*before["cases"], *chosen) if options.only in name}
    lines = compare(before, after, names)
    print("\n".join(lines) or f"{len(names)} cases are as they were")
    return int(bool(lines))


if __name__ == "__main__":
    from tests.support import recorder  # ranks look its functions up by the name of this module

    sys.exit(recorder.main())
