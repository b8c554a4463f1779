"""Ulysses under DeepSpeed's names: attention, loaders and groups as its documentation calls them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.as_deepspeed import MARK, results, run_ranks

pytest.importorskip("transformers")

SCRIPT = f"""
import json
import torch
import torch.distributed.nn.functional
import deepspeed
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.utils import groups
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

deepspeed.init_distributed()
rank = deepspeed.comm.get_rank()
said = {{}}


def build():
    torch.manual_seed(0)
    sizes = dict(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=1, use_cache=False, attn_implementation="sdpa")
    return LlamaForCausalLM(LlamaConfig(**sizes))


def rows(seed):
    ids = torch.randint(40, (2, 8), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[:, : 3 + seed] = -100
    return {{"input_ids": ids, "labels": labels, "position_ids": torch.arange(8).expand(2, -1)}}


class Loader:
    def __len__(self):
        return 2

    def __iter__(self):
        return iter([rows(2 * batch + rank) for batch in range(2)])


# models of Transformers, as the tutorial has it
mpu = UlyssesSPAttentionHF.register_with_transformers(
    model_name_or_path=build(), core_attn_implementation="sdpa", sequence_parallel_size=2, micro_batch_size=2,
    seq_length_is_variable=True)
config = {{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {{"stage": 3}}, "gradient_clipping": 0.1,
          "optimizer": {{"type": "Adam", "params": {{"lr": 1e-2}}}}}}
engine, _, _, _ = deepspeed.initialize(model=build(), config=config, mpu=mpu)
group = groups._get_sequence_parallel_group()
said["sizes"] = [groups._get_sequence_parallel_world_size(), groups._get_sequence_parallel_rank(), engine.dp_world_size]
loader = UlyssesSPDataLoaderAdapter(Loader(), sp_rank=mpu.get_sequence_parallel_rank(), sp_group=group,
                                    sp_world_size=2, device=engine.device)
said["batches"] = len(loader)
for batch in loader:
    labels = batch.pop("shift_labels")
    loss = engine(**batch, labels=labels, shift_labels=labels).loss
    counts = (labels != -100).sum()
    losses = torch.stack(torch.distributed.nn.functional.all_gather(loss, group=group))
    every = torch.stack(torch.distributed.nn.functional.all_gather(counts, group=group))
    total = (torch.where(every > 0, losses, torch.zeros_like(losses)) * every).sum() / every.sum()
    engine.backward(total)
    engine.step()
found = engine.module_state_dict() if hasattr(engine, "module_state_dict") else engine.state_dict()

plain = build()
optimizer = torch.optim.Adam(plain.parameters(), lr=1e-2)
for seed in range(4):
    optimizer.zero_grad()
    plain(**rows(seed)).loss.backward()
    nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    optimizer.step()
engine.destroy()
said["difference"] = max(
    float((value - plain.state_dict()[name]).abs().max()) for name, value in engine.module.state_dict().items())


# attention of the user's own, in the layout (tokens, batch, heads, width)
class Own(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.attend = DistributedAttention(self.local, group, scatter_idx=2, gather_idx=0)

    @staticmethod
    def local(q, k, v):
        scores = torch.einsum("sbhd,tbhd->bhst", q, k).softmax(-1)
        return torch.einsum("bhst,tbhd->sbhd", scores, v).flatten(2)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 2)).unbind(2)
        return self.attend(q, k, v, 1)


torch.manual_seed(1)
own, x = Own(None), torch.randn(6, 2, 8)
alone = own(x)
engine, _, _, _ = deepspeed.initialize(model=own, config=config, mesh_param=(1, 2))
shared = engine(x.chunk(2)[rank])
said["own"] = float((shared.flatten(2) - alone.chunk(2)[rank]).abs().max())
print({MARK!r} + json.dumps([rank, said]), flush=True)
"""


@pytest.mark.slow
def test_ulysses_under_deepspeeds_names_follows_one_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    for rank, said in results(run_ranks(script)):
        assert said["sizes"] == [2, rank, 2]
        assert said["batches"] == 4
        assert said["difference"] < 1e-5
        assert said["own"] < 1e-6
