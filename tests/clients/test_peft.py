"""PEFT's LoRA models under DeepSpeed's names: DDP's numbers at every stage, and adapters and merged models on disk."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwell.checkpoint.export import to_safetensors
from shardwell.checkpoint.sources import open_source
from shardwell.compat.deepspeed_api.initialization import initialize
from shardwell.zero import GatheredParameters
from tests.support.ranks import Ranks

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
STEPS = 3


def base() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 16}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    model: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    return model


def adapted() -> Any:
    model = base()
    torch.manual_seed(1)
    made = peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_B" in name:  # which are zero at first
                parameter.normal_(std=0.1)
    return made


def batch(number: int, rank: int) -> Tensor:
    return torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(10 * number + rank))


def train(model: Any, backward: Any, step: Any) -> list[float]:
    losses = []
    for number in range(STEPS):
        ids = batch(number, dist.get_rank())
        loss = model(input_ids=ids, labels=ids).loss
        backward(loss)
        step()
        losses.append(float(loss))
    return losses


def by_ddp() -> tuple[list[float], dict[str, Tensor]]:
    model = adapted()
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, weight_decay=0.0)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    losses = train(wrapped, lambda loss: loss.backward(), step)
    return losses, {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def by_engine(folder: str, stage: int) -> tuple[list[float], dict[str, Tensor], list[str]]:
    model = adapted()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "gradient_clipping": 1e9,
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    engine = initialize(model=model, model_parameters=trained, config=config)[0]
    losses = train(engine, engine.backward, engine.step)
    engine.save_checkpoint(f"{folder}/run")
    whole = engine.module_state_dict()
    with GatheredParameters(list(model.parameters())):  # as PEFT's page about DeepSpeed saves an adapter
        if dist.get_rank() == 0:
            model.save_pretrained(f"{folder}/adapter")
    dist.barrier()
    names = sorted(name for name, p in model.named_parameters() if p.requires_grad)
    return losses, {name: whole[name] for name in names}, names


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=batch(99, 0)).logits
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_lora_trains_like_ddp_and_is_saved_as_adapter_and_merged(ranks: Ranks, tmp_path: Path, stage: int) -> None:
    plain, found = ranks.run(2, by_ddp), ranks.run(2, by_engine, str(tmp_path), stage)
    for (losses, weights), (losses_found, weights_found, names) in zip(plain, found, strict=True):
        assert losses_found == pytest.approx(losses, rel=1e-5)
        assert names == sorted(weights)
        for name in names:
            torch.testing.assert_close(torch.as_tensor(weights_found[name]), torch.as_tensor(weights[name]))
    expected = adapted()
    with torch.no_grad():
        for name, parameter in expected.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.as_tensor(found[0][1][name]))
    reference = logits(expected)
    torch.testing.assert_close(logits(peft.PeftModel.from_pretrained(base(), tmp_path / "adapter")), reference)
    with closing(open_source(tmp_path / "run")) as source:
        to_safetensors(source, tmp_path / "merged", merges=True)
    merged = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), reference, rtol=1e-4, atol=1e-5)
