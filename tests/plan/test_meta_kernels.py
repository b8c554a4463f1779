"""Operations on meta tensors that are computed once: what is made again is what the operation makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwell.plan import meta_kernels
from shardwell.plan.meta_kernels import run, tensors_in

ATEN = torch.ops.aten


def meta(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*size, dtype=dtype, device="meta")


def forms(result: Any) -> list[Any]:
    return [
        (one.shape, one.stride(), one.dtype, one.device, one.storage_offset(), one.untyped_storage().nbytes())
        for one in tensors_in(result)
    ]


@pytest.mark.parametrize(
    ("operation", "arguments"),
    [
        (ATEN.mm.default, (meta(3, 4).t(), meta(3, 5))),
        (ATEN.add.Tensor, (meta(3, 4), meta(4, dtype=torch.float32))),
        (ATEN.mul.Tensor, (meta(2, 3).t(), 2)),
        (ATEN.mul.Tensor, (meta(2, 3, dtype=torch.int64), 2)),
        (ATEN.mul.Tensor, (meta(2, 3, dtype=torch.int64), 2.0)),
        (ATEN.cat.default, ([meta(2, 3), meta(4, 3)],)),
        (ATEN.native_layer_norm.default, (meta(2, 8), [8], nn.Parameter(meta(8)), meta(8), 1e-5)),
        (ATEN._scaled_dot_product_flash_attention.default, (*(meta(1, 2, 8, 16) for _ in range(3)), 0.0, True)),
    ],
)
def test_what_is_made_again_has_the_form_of_the_first_result(operation: Any, arguments: Any) -> None:
    wanted = operation(*arguments)
    for _ in range(3):
        found = run(operation, arguments, {})
        assert forms(found) == forms(wanted)
        assert type(found) is type(wanted)
        of_inputs = {one.untyped_storage()._cdata for one in tensors_in(arguments)}
        assert not of_inputs & {one.untyped_storage()._cdata for one in tensors_in(found)}


def test_an_operation_of_known_sizes_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meta_kernels, "_results", {})
    run(ATEN.mm.default, (meta(6, 7), meta(7, 5)), {})
    assert len(meta_kernels._results) == 1
    run(ATEN.mm.default, (meta(6, 7), meta(7, 5)), {})
    assert len(meta_kernels._results) == 1
    run(ATEN.mm.default, (meta(6, 7), meta(7, 4)), {})
    assert len(meta_kernels._results) == 2


def test_views_and_writes_keep_their_storage() -> None:
    x = meta(4, 6)
    for _ in range(2):
        for operation, arguments in (
            (ATEN.t.default, (x,)),
            (ATEN._unsafe_view.default, (x, [24])),
            (ATEN.add_.Tensor, (x, 1)),
        ):
            assert run(operation, arguments, {}).untyped_storage()._cdata == x.untyped_storage()._cdata


def test_tensors_with_values_are_computed_each_time() -> None:
    one, other = torch.ones(2), torch.full((2,), 2.0)
    assert run(ATEN.add.Tensor, (one, one), {}).tolist() == [2.0, 2.0]
    assert run(ATEN.add.Tensor, (one, other), {}).tolist() == [3.0, 3.0]
