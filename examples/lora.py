"""Train a LoRA adapter of a Hugging Face model, in a loop of your own:  shardwell run -n 2 examples/lora.py [MODEL]

Without MODEL, the folder of a model, a tiny new one is used. The frozen weights are sharded, and have neither gradients
nor optimizer state. `shardwell train --method lora` does this from the shell.
"""

import sys

import peft
import torch
import transformers

import shardwell

STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 20
config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "steps_per_print": 10,
}
with shardwell.zero.Init(config=config):
    torch.manual_seed(0)
    if len(sys.argv) > 1 and sys.argv[1] != "-":
        base = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
    else:
        tiny = transformers.LlamaConfig(
            vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
        )
        base = transformers.AutoModelForCausalLM.from_config(tiny)
model = peft.get_peft_model(base, peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
engine, *_ = shardwell.initialize(model=model, config=config)

torch.manual_seed(engine.global_rank)
for _ in range(STEPS):
    tokens = (torch.randint(128, (4, 1)) + torch.arange(16)) % 128
    loss = engine(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    engine.step()

engine.save_checkpoint("lora-run")  # then: shardwell checkpoint export lora-run adapter
if engine.global_rank == 0:
    print(f"loss {loss.item():.3f}")
