"""Any model, used in any way that all ranks share, follows plain PyTorch.

`SHARDWELL_EXAMPLES=500` tries so many other models instead of the usual ones.
"""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.random_models import CONTAINERS, LEAVES, Case, train_plainly, train_sharded
from tests.support.ranks import Ranks

pytestmark = pytest.mark.slow

EXAMPLES = int(os.environ.get("SHARDWELL_EXAMPLES", "0"))


def several(items: st.SearchStrategy, least: int = 0, most: int = 3) -> st.SearchStrategy[tuple]:
    return st.lists(items, min_size=least, max_size=most).map(tuple)


NUMBER = st.integers(0, 15)
LEAF = st.sampled_from(list(LEAVES))
TREE = st.recursive(
    LEAF, lambda inner: st.tuples(st.sampled_from(list(CONTAINERS)), several(inner, 1, 3)), max_leaves=5
)
LIMITS = st.sampled_from(
    [
        (),
        (("stage3_param_persistence_threshold", 3),),
        (("stage3_param_persistence_threshold", 7),),
        (("stage3_param_persistence_threshold", 1000),),
        (("stage3_param_persistence_threshold", 8), ("stage3_model_persistence_threshold", 9)),
        (("stage3_prefetch_bucket_size", 0),),
        (("stage3_max_live_parameters", 1),),
        (("stage3_max_reuse_distance", 60),),
        (("stage3_max_reuse_distance", 100000),),
    ]
)
CASES = st.builds(
    Case,
    stage=st.sampled_from([3, 2, 1, 0]),
    blocks=several(TREE, 1, 4),
    outside=several(LEAF, 0, 2),
    width=st.sampled_from([2, 1, 3, 5, 8]),
    shared=several(st.tuples(NUMBER, NUMBER, st.booleans()), 0, 2),
    orders=several(several(st.integers(0, 3), 0, 5), 1, 4),
    frozen=several(several(NUMBER, 0, 3), 1, 3),
    penalised=several(NUMBER, 0, 2),
    recompute=several(st.sampled_from(["", "non-reentrant", "reentrant"]), 1, 2),
    num_losses=st.integers(1, 2),
    steps=st.integers(3, 4),
    accumulation=st.integers(1, 3),
    clip=st.sampled_from([0.0, 0.1, 1.0]),
    groups=st.sampled_from(["one", "two", "some"]),
    born_sharded=st.booleans(),
    leaf=st.none() | st.tuples(st.sampled_from(["name", "class"]), NUMBER),
    limits=LIMITS,
    synced=st.booleans(),
    between=st.sampled_from(["", "evaluate", "drop"]),
)


@settings(
    max_examples=EXAMPLES or 30,
    derandomize=not EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(case=CASES)
@pytest.mark.timeout(3600)
def test_a_random_model_follows_plain_pytorch(ranks: Ranks, case: Case) -> None:
    expected = train_plainly(case)
    answers = ranks.run(2, train_sharded, case)
    losses = [sum(of_ranks) / 2 for of_ranks in zip(*(answer["losses"] for answer in answers), strict=True)]
    assert losses == pytest.approx(expected.losses, rel=case.tolerance, abs=case.tolerance), "losses differ"
    for answer in answers:
        assert answer["norms"] == pytest.approx(expected.norms, rel=case.tolerance, abs=case.tolerance), "norms differ"
        assert answer["parameters"].keys() == expected.parameters.keys()
        for name, values in expected.parameters.items():
            difference = (torch.as_tensor(answer["parameters"][name]) - values).abs()
            assert not (difference > case.tolerance * (1 + values.abs())).any(), f"{name} differs by {difference.max()}"
