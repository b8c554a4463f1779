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
    "named input": lambda x: torch.cumsum(input=x.requires_grad_(), dim=1),
    "named factors": lambda x: torch.matmul(input=heads(x), other=heads(x).mT),
    "added scores": lambda x: torch.baddbmm(torch.zeros(1, 1, 1), x, x.mT),
    "any rows": lambda x: torch.einsum("...qd,...kd->...qk", x, x),
    "linear attention": lambda x: x.requires_grad_() @ (x.mT @ x),
    "linear attention by letters": lambda x: torch.einsum("btd,bte->bde", x.requires_grad_(), x),
    "pooling": lambda x: F.max_pool1d(x.mT, 3, 1, 1),
    "norm of channels": lambda x: F.instance_norm(x.mT),
    "unit length": lambda x: F.normalize(x.requires_grad_(), dim=1),
    "transform": lambda x: torch.fft.fft(x.requires_grad_(), dim=1),
    "shift": lambda x: F.pad(x.requires_grad_(), (0, 0, 1, 0))[:, :-1],
    "shift by joining": lambda x: torch.cat([torch.zeros(ROWS, 1, WIDTH), x.requires_grad_()[:, :-1]], dim=1),
    "prompt": lambda x: torch.cat([torch.zeros(ROWS, 3, WIDTH), x.requires_grad_()], dim=1),
    "padded convolution": lambda x: F.conv1d(x.mT, CONVOLUTION.weight, None, 1, 1),
}
MAY = {
    "context": lambda x: F.scaled_dot_product_attention(heads(x), CONTEXT, CONTEXT),
    "documents": in_documents,
    "linear": lambda x: F.linear(x, ATTENTION.out_proj.weight) @ torch.ones(WIDTH, TOKENS),
    "heads of a token": lambda x: x.unflatten(-1, (2, -1)) @ x.unflatten(-1, (2, -1)).mT,
    "kernel of one": lambda x: F.conv1d(x.mT, torch.ones(WIDTH, WIDTH, 1)),
    "experts": lambda x: torch.einsum("bsec,bsm->becm", torch.ones(ROWS, TOKENS, 4, 3), x),
    "chunks": lambda x: torch.cat([one * 2 for one in x.requires_grad_().chunk(2, dim=1)], dim=1),
    "choice of experts": lambda x: torch.einsum("bte,bted->btd", x.softmax(-1), x[..., None] * torch.ones(4)),
    "weights of heads": lambda x: x[:, :, None].softmax(-1) @ torch.ones(WIDTH, 3),
    "several": lambda x: torch.einsum("bsd,bsd->bs", x, x),
    "best experts": lambda x: torch.topk(x.requires_grad_(), 2).values,
    "sorted features": lambda x: x.requires_grad_().sort().values,
    "transform of features": lambda x: torch.fft.fft(x.requires_grad_()),
}


@pytest.mark.parametrize("name", MIXES)
def test_an_operation_along_the_sequence_is_refused(name: str) -> None:
    with pytest.raises(ShardwellError, match=f"over {TOKENS}"):
        run(MIXES[name])
    MIXES[name](torch.randn(ROWS, TOKENS, WIDTH))  # the check ended with the forward that raised


@pytest.mark.parametrize("name", MAY)
def test_what_stays_inside_of_tokens_runs(name: str) -> None:
    run(MAY[name], times=3)
