"""The model of `benchmarks.train_cli`, and its run of Transformers' Trainer on FSDP2; nobody calls it by hand."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from benchmarks.train_cli import MEASURED, WARM_UP
from benchmarks.trainer_worker import SIZES
from shardwell.train.models import byte_tokenizer


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The text, cut into rows of tokens."""

    def __init__(self, path: Path, tokenizer: Any, length: int) -> None:
        tokens = torch.tensor(tokenizer(path.read_text())["input_ids"])
        self.rows = tokens[: len(tokens) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Clock(TrainerCallback):  # type: ignore[misc]
    """Times the steps after the first ones as a whole, with the device idle at both ends."""

    def __init__(self, device: str) -> None:
        self.device, self.moments = device, {}  # step -> when it ended

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the time of the two steps that matter."""
        if state.global_step in (WARM_UP, WARM_UP + MEASURED):
            if self.device == "cuda":
                torch.cuda.synchronize()
            self.moments[state.global_step] = time.perf_counter()


def make(spec: dict[str, Any], folder: Path) -> None:
    """Save a model of random weights, with a tokenizer of bytes."""
    config = LlamaConfig(
        vocab_size=32000 if spec["size"] == "1b" else 300, max_position_embeddings=4096, **SIZES[spec["size"]]
    )
    set_seed(0)
    with torch.device(spec["device"]):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")


def train(spec: dict[str, Any], folder: Path) -> None:
    """Train with the Trainer, and write the figures."""
    on_gpu = spec["device"] == "cuda"
    wrapped = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "reshard_after_forward": True}
    args = TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=spec["batch"],
        max_steps=WARM_UP + MEASURED,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        logging_steps=WARM_UP,
        report_to=[],
        save_strategy="no",
        seed=0,
        max_grad_norm=1.0,
        disable_tqdm=True,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        dataloader_pin_memory=on_gpu,
        optim="adamw_torch_fused",
        fsdp="full_shard auto_wrap",
        fsdp_config=wrapped,
    )
    set_seed(0)
    is_adapter = spec["method"] == "lora"
    dtype = torch.bfloat16 if is_adapter else torch.float32  # as `shardwell train` reads it
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype)
    if is_adapter:
        import peft

        options = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, options)
    clock = Clock(spec["device"])
    data = Rows(folder / "text.txt", byte_tokenizer(), spec["length"])
    trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[clock])
    trainer.train()
    figures = {
        "seconds_per_step": (clock.moments[WARM_UP + MEASURED] - clock.moments[WARM_UP]) / MEASURED,
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "loss": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-1],
    }
    (folder / f"trainer-{spec['method']}.json").write_text(json.dumps(figures))


def main() -> None:
    """Do what the JSON in argv[1] describes, in the folder argv[2]."""
    spec, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    (make if spec["task"] == "make" else train)(spec, folder)


if __name__ == "__main__":
    main()
