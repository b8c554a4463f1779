"""Fine-tune a Hugging Face model, in a loop of your own:  shardwell run -n 2 examples/fine_tune.py [MODEL]

Without MODEL, the folder of a model, a tiny new one is used. Each rank reads its own shards of the weights. `shardwell
train` does this from the shell.
"""

import sys

import torch
import transformers

import shardwell

STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 20
config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": STEPS, "warmup_num_steps": 2}},
    "zero_optimization": {"stage": 3},
    "steps_per_print": 10,
}
with shardwell.zero.Init(config=config):
    torch.manual_seed(0)
    if len(sys.argv) > 1 and sys.argv[1] != "-":
        model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
    else:
        tiny = transformers.LlamaConfig(
            vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
        )
        model = transformers.AutoModelForCausalLM.from_config(tiny)
engine, *_ = shardwell.initialize(model=model, config=config)

torch.manual_seed(engine.global_rank)
for _ in range(STEPS):
    tokens = (torch.randint(128, (4, 1)) + torch.arange(16)) % 128
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()

engine.save_checkpoint("fine-tuned")  # then: shardwell checkpoint export fine-tuned model
