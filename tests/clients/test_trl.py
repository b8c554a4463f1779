"""TRL's trainers train at stage 3 on shardwell as in DDP: SFT, DPO, reward, KTO, and GRPO and RLOO that generate."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.trainer_scripts import run_trainer

pytest.importorskip("trl")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

BODY = """
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForSequenceClassification, PreTrainedTokenizerFast
from trl.experimental.kto import KTOConfig, KTOTrainer

words = {word: index for index, word in enumerate(["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(61))])}
kind = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
kind.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=kind, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")

def text(first):
    return " ".join(f"w{(first * 7 + j) % 61}" for j in range(6))

def sharded():
    config = ds()
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0  # also the last layer, as in a large model
    return config

def options(where, is_sharded, **more):
    place = {"deepspeed": sharded()} if is_sharded else {"use_cpu": True}
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

def classifier():
    set_seed(0)
    settings = config()
    settings.num_labels, settings.pad_token_id = 1, 0
    return LlamaForSequenceClassification(settings)

def reward(is_sharded, model=None):
    model = model or classifier()
    args = trl.RewardConfig(max_length=16, **options("reward", is_sharded))
    model = model() if model is classifier else model  # with DeepSpeed in force, the inner model is one of zero.Init
    rows = {name: [text(i + shift) for i in range(16)] for shift, name in enumerate(("chosen", "rejected"))}
    trainer = trl.RewardTrainer(model=model, args=args, train_dataset=Dataset.from_dict(rows),
                                processing_class=tokenizer)
    trainer.train()
    return history(trainer)

def kto(is_sharded):
    args = KTOConfig(max_length=16, **options("kto", is_sharded))
    rows = {name: [text(i + shift) for i in range(16)] for shift, name in enumerate(("prompt", "completion"))}
    rows["label"] = [i % 2 == 0 for i in range(16)]
    trainer = KTOTrainer(model=build(), ref_model=build(), args=args, train_dataset=Dataset.from_dict(rows),
                         processing_class=tokenizer)
    trainer.train()
    return history(trainer)

for act in (sft, dpo, reward, kto):
    attempt(act.__name__ + " in ddp", lambda act=act: act(False))
    attempt(act.__name__, lambda act=act: act(True))

def generating(kind, settings, **more):
    args = settings(num_generations=2, max_completion_length=4, **options("generating", True), **more)
    rows = Dataset.from_dict({"prompt": [text(i) for i in range(16)]})
    reward = lambda completions, **others: [float(len(words)) for words in completions]
    trainer = kind(model=f"{folder}/weights", reward_funcs=reward, args=args, train_dataset=rows,
                   processing_class=tokenizer)
    trainer.train()
    return history(trainer)
attempt("reward, built in shards", lambda: reward(True, classifier))
if rank == 0:
    build().save_pretrained(f"{folder}/weights")
torch.distributed.barrier()
attempt("grpo", lambda: generating(trl.GRPOTrainer, trl.GRPOConfig, beta=0.1))
attempt("rloo", lambda: generating(trl.RLOOTrainer, trl.RLOOConfig))
"""


def test_trainers_train_with_sharded_models(tmp_path: Path) -> None:
    found = run_trainer(BODY, tmp_path, 3)
    assert not {name: words for name, words in found.items() if str(words).startswith("failed")}
    for name in ("sft", "dpo", "reward", "kto"):
        for one, two in zip(found[name], found[f"{name} in ddp"], strict=True):
            assert one == pytest.approx(two, rel=1e-3), name
    assert len(found["grpo"]) == len(found["rloo"]) == len(found["reward, built in shards"]) == 2
