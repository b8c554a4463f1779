"""Somebody else on the network of a job of two hosts gets nothing, and the job goes on."""

from __future__ import annotations

import pytest

from tests.campaigns.network import why_no_network
from tests.campaigns.strangers import campaign

pytestmark = pytest.mark.slow

REFUSED = why_no_network()


@pytest.mark.skipif(REFUSED is not None, reason=f"no hosts here: {REFUSED}")
def test_a_third_party_gains_nothing_and_the_job_is_the_same_bit_for_bit() -> None:
    result = campaign(1, 1, 0.0)
    assert result.bad == []
    assert result.outcomes == {"as if alone": 1}
    tried = {"clients of torch's store", "garbage", "half-open connections", "wrong secrets", "pickles"}
    assert set(result.figures) >= tried
