"""Adapters of cut layers are cut with them, and train as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import shardwell
from shardwell.errors import ShardwellError
from tests.support.models import batches, zero
from tests.support.ranks import Ranks
from tests.support.tensor_models import PLAN, ROWS, TensorCase
from tests.support.training import distance

peft = pytest.importorskip("peft")

NAMES = {f"base_model.model.{pattern}": style for pattern, style in PLAN.items()}


def adapted() -> nn.Module:
    torch.manual_seed(0)
    model = TensorCase().build()
    config = peft.LoraConfig(r=4, target_modules=["q", "out", "up", "down"], init_lora_weights=False)
    return peft.get_peft_model(model, config).double()


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def on_a_grid(stage: int, tensor: dict[str, Any], folder: str) -> dict[str, Tensor]:
    model = adapted()
    config = zero(stage, gradient_clipping=0.1, tensor_parallel={"autotp_size": 2, "plan": NAMES, **tensor})
    optimizer = torch.optim.AdamW(trainable(model), lr=1e-2)
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=config).engine
    for batch in batches(3, ROWS):
        engine.backward(engine(batch.chunk(engine.data_size)[engine.data_rank]))
        engine.step()
    found = engine.state_dict()
    with pytest.raises(ShardwellError, match="save_pretrained would write this rank's parts of"):
        model.save_pretrained(folder)
    if engine.global_rank == 0:
        model.save_pretrained(folder, state_dict=found)
    engine.destroy()
    assert "save_pretrained" not in vars(model)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_adapters_of_cut_layers_follow_one_process(ranks: Ranks, stage: int, tmp_path: Path) -> None:
    model = adapted()
    optimizer = torch.optim.AdamW(trainable(model), lr=1e-2)
    for batch in batches(3, ROWS):
        optimizer.zero_grad()
        model(batch).backward()
        nn.utils.clip_grad_norm_(trainable(model), 0.1)
        optimizer.step()
    tensor = {"sequence_parallel": stage == 1}
    found = ranks.run(4, on_a_grid, stage, tensor, str(tmp_path))[-1]
    difference, name = distance(found, model.state_dict())
    assert difference < 1e-10, f"{name} differs by {difference}"
    overlapped = ranks.run(4, on_a_grid, stage, {**tensor, "tp_overlap_comm": True}, str(tmp_path))[-1]
    for name, value in found.items():
        assert (torch.as_tensor(overlapped[name]) == torch.as_tensor(value)).all(), name
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert distance(saved, peft.get_peft_model_state_dict(model))[0] < 1e-10


def generated() -> str:
    """Generate inside of PEFT's model, with a cut vocabulary; return the words."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, num_hidden_layers=1)
    model = peft.get_peft_model(
        transformers.LlamaForCausalLM(config), peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    )
    plan = {"tensor_parallel": {"autotp_size": 2, "plan": {"*.*.lm_head": "colwise"}}}
    optimizer = torch.optim.AdamW(trainable(model), lr=1e-2)
    shardwell.initialize(model=model, optimizer=optimizer, config=zero(1, **plan))
    tokens = torch.ones(2, 4, dtype=torch.long)
    try:
        model.generate(input_ids=tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=2)
    except ShardwellError as error:
        return str(error)
    return "it generated"


def test_generating_from_a_part_of_the_vocabulary_inside_of_a_wrapper_is_refused(ranks: Ranks) -> None:
    for words in ranks.run(2, generated):
        assert "argmax is over the outputs of 'lm_head.weight'" in words
