"""Scripts around `transformers.Trainer` with a DeepSpeed configuration, run in processes of their own.

A script is the preamble below and a body. The body calls `attempt(name, function)`, which prints the function's result,
or its error, for the test.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.as_deepspeed import results, run_ranks

PREAMBLE = """
import json, os, sys, traceback
import torch, accelerate
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

stage, folder, rank = int(sys.argv[1]), sys.argv[2], int(os.environ["RANK"])

def config():
    return LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                       num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=False)

def build(kind=LlamaForCausalLM):
    set_seed(0)
    return kind(config())

class Data(torch.utils.data.Dataset):
    def __init__(self, rows=16, seed=1):
        self.tokens = torch.randint(64, (rows, 8), generator=torch.Generator().manual_seed(seed))
    def __len__(self):
        return len(self.tokens)
    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}

def ds(**more):
    zero = {"stage": stage, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto", "overlap_comm": True,
            "stage3_param_persistence_threshold": "auto", "stage3_gather_16bit_weights_on_model_save": True}
    return {"zero_optimization": zero, "fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"},
            "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": False, **more}

ADAM = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}

def arguments(where, deepspeed, **more):
    options = dict(output_dir=f"{folder}/{where}", per_device_train_batch_size=2, num_train_epochs=2,
                   learning_rate=1e-2, lr_scheduler_type="linear", logging_steps=1, report_to=[],
                   save_strategy="no", seed=0, gradient_accumulation_steps=2, max_grad_norm=0.5, disable_tqdm=True,
                   weight_decay=0.1)
    options.update(more)
    if deepspeed is None:
        return TrainingArguments(use_cpu=True, **options)
    return TrainingArguments(deepspeed=deepspeed, **options)

def history(trainer):
    return [[entry["loss"], entry["grad_norm"], entry["learning_rate"]] for entry in trainer.state.log_history
            if "loss" in entry]

def trained(where, model=None, data=None, deepspeed=None, resume=None, **more):
    args = arguments(where, ds() if deepspeed is None else deepspeed, **more)
    trainer = Trainer(model=model or build(), args=args, train_dataset=data or Data(), eval_dataset=Data(8, 2))
    trainer.train(resume_from_checkpoint=resume)
    return trainer

def attempt(name, act):
    try:
        found = act()
    except Exception as error:
        found = "failed: " + "".join(traceback.format_exception(error))[-3000:]
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()
    for variable in ("ACCELERATE_USE_CPU", "ACCELERATE_USE_DEEPSPEED"):  # otherwise DDP would be DeepSpeed from now on
        os.environ.pop(variable, None)
    if rank == 0:
        print("RESULT " + json.dumps([name, found]), flush=True)
"""


def run_trainer(body: str, folder: Path, stage: int, *, ranks: int = 2) -> dict[str, Any]:
    """Run a body at a stage, and return what its attempts returned, by name."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "script.py"
    script.write_text(PREAMBLE + body)
    found: dict[str, Any] = dict(results(run_ranks(script, str(stage), str(folder), ranks=ranks)))
    return found
