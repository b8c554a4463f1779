"""Which operations count as passing values along a sequence, where a rank has a part of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwell.errors import ShardwellError
from shardwell.runtime.token_mixing import TokenMixingCheck, whole_sequences

ROWS, TOKENS, WIDTH = 2, 6, 8


class Around(nn.Module):
    """A module that runs a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def run(function: Callable[[Tensor], Tensor], times: int = 1) -> None:
    model = Around(function)
    TokenMixingCheck(lambda: TOKENS, "{name} over {tokens}").hook(model)
    for _ in range(times):
        model(torch.randn(ROWS, TOKENS, WIDTH))


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, -1)).transpose(1, 2)


def in_documents(x: Tensor) -> Tensor:
    """Attend to two documents in whole sequences, each of which is as long as a part."""
    with whole_sequences():
        return F.scaled_dot_product_attention(heads(x), heads(x), heads(x))


ATTENTION = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
GRU, CONVOLUTION = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.Conv1d(WIDTH, WIDTH, 3)
CONTEXT = torch.randn(ROWS, 2, 11, WIDTH // 2)

MIXES = {
    "attention": lambda x: F.scaled_dot_product_attention(heads(x), heads(x), heads(x)),
    "by name": lambda x: F.scaled_dot_product_attention(heads(x), key=heads(x), value=heads(x)),
    "module": lambda x: ATTENTION(x, x, x)[0],
    "scores": lambda x: (heads(x) @ heads(x).mT).softmax(-1),
    "einsum": lambda x: torch.einsum("bqd,bkd->bqk", x, x),
    "recurrent": lambda x: GRU(x)[0],
    "causal convolution": lambda x: CONVOLUTION(F.pad(x.mT, (2, 0))),
    "padded convolution": lambda x: F.conv1d(x.mT, CONVOLUTION.weight, None, 1, 1),
}
MAY = {
    "context": lambda x: F.scaled_dot_product_attention(heads(x), CONTEXT, CONTEXT),
    "documents": in_documents,
    "linear": lambda x: F.linear(x, ATTENTION.out_proj.weight) @ torch.ones(WIDTH, TOKENS),
    "heads of a token": lambda x: x.unflatten(-1, (2, -1)) @ x.unflatten(-1, (2, -1)).mT,
    "kernel of one": lambda x: F.conv1d(x.mT, torch.ones(WIDTH, WIDTH, 1)),
    "experts": lambda x: torch.einsum("bsec,bsm->becm", torch.ones(ROWS, TOKENS, 4, 3), x),
    "several": lambda x: torch.einsum("bsd,bsd->bs", x, x),
}


@pytest.mark.parametrize("name", MIXES)
def test_an_operation_along_the_sequence_is_refused(name: str) -> None:
    with pytest.raises(ShardwellError, match=f"over {TOKENS}"):
        run(MIXES[name])
    MIXES[name](torch.randn(ROWS, TOKENS, WIDTH))  # the check ended with the forward that raised


@pytest.mark.parametrize("name", MAY)
def test_what_stays_inside_of_tokens_runs(name: str) -> None:
    run(MAY[name], times=3)
