"""One run of Transformers' Trainer: what ``benchmarks.trainer`` starts, and nobody calls by hand."""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

WARM_UP_STEPS = 3
SIZES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    "1b": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 16},
}
SEQUENCES = {"tiny": 32, "1b": 1024}
PROMPT, NEW_TOKENS = 16, 48


class Tokens(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random rows, the same for every contender."""

    def __init__(self, vocabulary: int, length: int, rows: int = 512) -> None:
        self.tokens = torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Clock(TrainerCallback):  # type: ignore[misc]
    """Times whole steps with the device idle at both ends, and takes the peak after the first steps."""

    def __init__(self, device: str) -> None:
        self.device, self.begin = device, 0.0
        self.seconds: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock, and forget the peak of the first steps."""
        if self.device == "cuda":
            torch.cuda.synchronize()
            if state.global_step == WARM_UP_STEPS:
                torch.cuda.reset_peak_memory_stats()
        self.begin = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop the clock."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.begin)


class Generating(Trainer):  # type: ignore[misc]
    """Trains on completions that the model in training has just generated, as GRPO does."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        prompts = inputs["input_ids"][:, :PROMPT].to(self.args.device)
        whole = self.accelerator.unwrap_model(model)
        whole.eval()
        with torch.no_grad():
            options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": True}
            rows = whole.generate(prompts, **options, pad_token_id=0, use_cache=True)
        inputs = {"input_ids": rows, "labels": rows}
        found: Tensor = super().training_step(model, inputs, *args, **kwargs)
        return found


def deepspeed_config(spec: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration as Transformers' guide has it."""
    zero: dict[str, Any] = {"stage": spec["stage"], "overlap_comm": True, "contiguous_gradients": True}
    if spec["stage"] == 3:
        sizes = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
        zero |= dict.fromkeys(sizes, "auto")
    if spec["offload"]:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    batch = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    optimizer = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
    return {
        "zero_optimization": zero,
        "bf16": {"enabled": "auto"},
        "optimizer": optimizer,
        **dict.fromkeys(batch, "auto"),
    }


def arguments(spec: dict[str, Any]) -> TrainingArguments:
    """Return the arguments of the Trainer, which differ by the engine only."""
    on_gpu = spec["device"] == "cuda"
    options: dict[str, Any] = {"deepspeed": deepspeed_config(spec)}
    if spec["engine"] == "fsdp2":
        wrapped = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "reshard_after_forward": True}
        options = {"fsdp": "full_shard auto_wrap", "fsdp_config": wrapped, "optim": "adamw_torch_fused"}
    generates = spec["task"] == "grpo"
    return TrainingArguments(
        output_dir=spec["folder"],
        per_device_train_batch_size=8 if generates else 4,
        max_steps=WARM_UP_STEPS + spec["steps"],
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        seed=0,
        max_grad_norm=1.0,
        disable_tqdm=True,
        gradient_checkpointing=not generates,
        gradient_checkpointing_kwargs=None if generates else {"use_reentrant": False},
        bf16=on_gpu,
        use_cpu=not on_gpu and spec["engine"] == "fsdp2",
        dataloader_pin_memory=on_gpu,
        **options,
    )


def main() -> None:
    """Run what the JSON in argv[1] describes."""
    spec = json.loads(sys.argv[1])
    length = SEQUENCES[spec["size"]]
    config = LlamaConfig(
        vocab_size=32000 if spec["size"] == "1b" else 256, max_position_embeddings=length, **SIZES[spec["size"]]
    )
    args = arguments(spec)
    set_seed(0)
    with torch.device(spec["device"]):  # drawing a billion values on the host takes longer than the run
        model = LlamaForCausalLM(config)
    clock = Clock(spec["device"])
    kind = Generating if spec["task"] == "grpo" else Trainer
    data = Tokens(config.vocab_size, length)
    trainer = kind(model=model, args=args, train_dataset=data, callbacks=[clock])
    trainer.train()
    on_gpu = spec["device"] == "cuda"
    figures = {
        "seconds": statistics.median(clock.seconds[WARM_UP_STEPS:]),
        "all_seconds": clock.seconds,
        "peak_allocated": torch.cuda.max_memory_allocated() if on_gpu else None,
        "rss_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    }
    Path(spec["folder"], "figures.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
