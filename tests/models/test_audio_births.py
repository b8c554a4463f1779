"""Audio models use weight norms, old and new: they are built in `zero.Init`, and train as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwell
from tests.support.models import whole_parameters, zero
from tests.support.ranks import Ranks
from tests.support.training import distance

hf = pytest.importorskip("transformers")

SPEECH = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 20,
    "conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "hidden_dropout": 0.0, "activation_dropout": 0.0,
    "attention_dropout": 0.0, "feat_proj_dropout": 0.0, "layerdrop": 0.0, "mask_time_prob": 0.0, "final_dropout": 0.0,
}  # fmt: skip
ENCODEC = {
    "hidden_size": 8, "num_filters": 4, "upsampling_ratios": [4, 2], "codebook_size": 16, "codebook_dim": 8,
    "num_lstm_layers": 1, "target_bandwidths": [1.5], "normalize": False,
}  # fmt: skip


class Speech(nn.Module):
    def __init__(self, kind: Any, config: Any) -> None:
        super().__init__()
        self.inner = kind(config)

    def forward(self, wave: Tensor) -> Tensor:
        return self.inner(wave).last_hidden_state


class Coder(nn.Module):
    """Encoder and decoder, without the codes between them, which have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = hf.EncodecModel(hf.EncodecConfig(**ENCODEC))

    def forward(self, wave: Tensor) -> Tensor:
        return self.inner.decoder(self.inner.encoder(wave[:, None]))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "wav2vec2": lambda: Speech(hf.Wav2Vec2Model, hf.Wav2Vec2Config(**SPEECH)),
    "hubert": lambda: Speech(hf.HubertModel, hf.HubertConfig(**SPEECH)),
    "wavlm": lambda: Speech(hf.WavLMModel, hf.WavLMConfig(**SPEECH)),
    "encodec": Coder,
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        return MODELS[name]()
    finally:
        torch.set_default_dtype(torch.float32)


def waves() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 320, generator=generator, dtype=torch.float64) for _ in range(2)]


def plainly(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = build(name)
    born = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for wave in waves():
        optimizer.zero_grad()
        model(wave).square().mean().backward()
        optimizer.step()
    return born, {key: parameter.detach() for key, parameter in model.named_parameters()}


def sharded(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    with shardwell.zero.Init(config=zero(3)):
        model = build(name)
    born = whole_parameters(model)
    engine, *_ = shardwell.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=zero(3)
    )
    for wave in waves():
        engine.backward(engine(wave.chunk(dist.get_world_size())[dist.get_rank()]).square().mean())
        engine.step()
    return born, whole_parameters(model)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_weight_norms_is_born_sharded_and_trains(ranks: Ranks, name: str) -> None:
    born, trained = plainly(name)
    for answer in ranks.run(2, sharded, name):
        assert distance(answer[0], born) < (1e-12, "")
        noise = {key for key in trained if key.endswith("k_proj.bias")}  # its gradient is zero but for rounding
        worst = distance(answer[1], trained, noise)
        assert worst[0] < 1e-9, worst
