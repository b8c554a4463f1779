"""TRL's SFT, DPO and GRPO train at stage 3 on shardwell, with a reference model, as in DDP."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.trainer_scripts import run_trainer

pytest.importorskip("trl")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BODY = """
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

words = {word: index for index, word in enumerate(["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(61))])}
kind = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
kind.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=kind, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")

def text(first):
    return " ".join(f"w{(first * 7 + j) % 61}" for j in range(6))

def options(where, is_sharded, **more):
    place = {"deepspeed": ds()} if is_sharded else {"use_cpu": True}
    return dict(output_dir=f"{folder}/{where}", per_device_train_batch_size=2, max_steps=2, learning_rate=1e-2,
                logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True, bf16=False, seed=0,
                gradient_checkpointing=False, **place, **more)

def sft(is_sharded):
    args = trl.SFTConfig(max_length=16, **options("sft", is_sharded))
    rows = Dataset.from_dict({"text": [text(i) for i in range(16)]})
    trainer = trl.SFTTrainer(model=build(), args=args, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    return history(trainer)

def dpo(is_sharded):
    args = trl.DPOConfig(max_length=16, **options("dpo", is_sharded))
    rows = {name: [text(i + shift) for i in range(16)] for shift, name in enumerate(("prompt", "chosen", "rejected"))}
    trainer = trl.DPOTrainer(model=build(), ref_model=build(), args=args, train_dataset=Dataset.from_dict(rows),
                             processing_class=tokenizer)
    trainer.train()
    return history(trainer)

for act in (sft, dpo):
    attempt(act.__name__ + " in ddp", lambda act=act: act(False))
    attempt(act.__name__, lambda act=act: act(True))

def grpo():
    args = trl.GRPOConfig(num_generations=2, max_completion_length=4, beta=0.1, **options("grpo", True))
    if rank == 0:
        build().save_pretrained(f"{folder}/weights")
    torch.distributed.barrier()
    rows = Dataset.from_dict({"prompt": [text(i) for i in range(16)]})
    reward = lambda completions, **others: [float(len(words)) for words in completions]
    trainer = trl.GRPOTrainer(model=f"{folder}/weights", reward_funcs=reward, args=args, train_dataset=rows,
                              processing_class=tokenizer)
    trainer.train()
    return history(trainer)
attempt("grpo", grpo)
"""


def test_sft_dpo_and_grpo_train_with_sharded_models(tmp_path: Path) -> None:
    found = run_trainer(BODY, tmp_path, 3, limit=700)
    assert not {name: words for name, words in found.items() if str(words).startswith("failed")}
    for name in ("sft", "dpo"):
        for one, two in zip(found[name], found[f"{name} in ddp"], strict=True):
            assert one == pytest.approx(two, rel=1e-3), name
    assert len(found["grpo"]) == 2
