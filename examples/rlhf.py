"""Train a policy with rewards, at ZeRO stage 3:  shardwell run -n 2 examples/rlhf.py

Each step generates answers, scores them, and trains the policy (REINFORCE with a baseline) while it stays near a frozen
reference model. The reward: how many of the generated tokens are even. The reference is an engine without an optimizer.
"""

import sys

import torch
from torch import Tensor, nn

import shardwell

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 30
WORDS, WIDTH, LENGTH, ROWS = 16, 32, 8, 16
ZERO = {"stage": 3, "stage3_param_persistence_threshold": 0}


class Policy(nn.Module):
    """A small recurrent language model: logits of the next token at each place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.body = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embed(tokens))[0])


@torch.no_grad()
def generate(engine: shardwell.Engine, prompts: Tensor) -> Tensor:
    """Sample answers. All ranks run as many forwards, so that parameters can be gathered for each."""
    tokens = prompts
    for _ in range(LENGTH):
        chances = engine(tokens)[:, -1].softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(chances, 1)], dim=1)
    return tokens


def log_chances(logits: Tensor, tokens: Tensor) -> Tensor:
    """The logarithms of the chances of the generated tokens."""
    return logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


torch.manual_seed(0)
policy, reference = Policy(), Policy()
reference.load_state_dict(policy.state_dict())
config = {"train_micro_batch_size_per_gpu": ROWS, "zero_optimization": ZERO}
trained, *_ = shardwell.initialize(
    model=policy, config={**config, "optimizer": {"type": "Adam", "params": {"lr": 2e-2}}, "gradient_clipping": 1.0}
)
frozen, *_ = shardwell.initialize(model=reference.requires_grad_(False), config=config)

torch.manual_seed(1 + trained.global_rank)
for step in range(STEPS):
    tokens = generate(trained, torch.randint(WORDS, (ROWS, 1), device=trained.device))
    reward = (tokens[:, 1:] % 2 == 0).float().mean(1)
    with torch.no_grad():
        usual = log_chances(frozen(tokens), tokens)
    chances = log_chances(trained(tokens), tokens)
    advantage = reward - reward.mean()
    distance = (chances - usual).mean()  # an estimate of the divergence from the reference
    loss = -(advantage[:, None] * chances).mean() + 0.01 * distance
    trained.backward(loss)
    trained.step()
    if (step % 10 == 0 or step == STEPS - 1) and trained.global_rank == 0:
        print(f"step {step:3}  reward {reward.mean().item():.3f}  distance {distance.item():.3f}", flush=True)
