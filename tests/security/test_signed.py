"""Words of ranks in the store: strangers cannot forge, replace or count them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardwell.cli.loopback import host_store
from shardwell.errors import DivergenceError, PeerError
from shardwell.parallel.agreement import Agreement
from shardwell.parallel.mesh import RankGroup
from shardwell.parallel.signed_store import SignedStore, signed_where_secret
from tests.support.ranks import Ranks

SECRET = "of nobody but these tests"
KEY = b"k" * 32


@pytest.fixture
def plain() -> Any:
    from datetime import timedelta

    return host_store(timedelta(seconds=10))


@pytest.fixture
def signed(plain: Any) -> SignedStore:
    return SignedStore(plain, KEY, "p", 0)


def other(plain: Any, rank: int = 1, key: bytes = KEY, prefix: str = "p") -> SignedStore:
    return SignedStore(plain, key, prefix, rank)


def test_ranks_of_a_job_hear_each_other(plain: Any, signed: SignedStore) -> None:
    signed.set("a", "words")
    assert other(plain).check(["a"])
    assert other(plain).get("a") == b"words"
    assert other(plain).compare_set("a", "", "mine") == b"words"
    assert signed.compare_set("b", "", "first") == b"first"
    assert signed.clone().get("b") == b"first"


def test_what_a_stranger_writes_is_as_if_it_were_not_there(plain: Any, signed: SignedStore) -> None:
    for forged in ("peer 1 stop", "", "0" * 64, b"\xff\x00" * 40):
        plain.set("failure", forged)
        assert not signed.check(["failure"])
        assert signed.compare_set("failure", "", "mine") == b"mine"


def test_another_key_another_name_another_engine_do_not_count(plain: Any, signed: SignedStore) -> None:
    signed.set("a", "words")
    assert not other(plain, key=b"x" * 32).check(["a"])
    assert not other(plain, prefix="q").check(["a"])
    plain.set("b", plain.get("a"))
    assert not signed.check(["b"])


def test_nobody_but_ranks_can_count(plain: Any, signed: SignedStore) -> None:
    assert signed.add("n", 0) == 0
    assert signed.add("n", 1) == 1
    plain.append("n", "|7.1 " + "0" * 32 + "|garbage|")
    plain.append("n", plain.get("n"))  # said again
    assert signed.add("n", 0) == 1
    assert other(plain).add("n", 1) == 2


def test_a_word_that_is_replaced_after_it_was_found_is_still_the_one_found(plain: Any, signed: SignedStore) -> None:
    signed.set("a", "words")
    assert signed.check(["a"])
    plain.set("a", "garbage")
    assert signed.get("a") == b"words"


def test_without_a_secret_the_store_is_used_as_it_is(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARDWELL_SECRET", raising=False)
    assert signed_where_secret(plain, "p", 0) is plain


def test_a_store_in_a_file_counts_as_it_can(tmp_path: Path) -> None:
    from torch.distributed import FileStore  # type: ignore[attr-defined, unused-ignore]

    signed = SignedStore(FileStore(str(tmp_path / "store"), 1), KEY, "p", 0)
    assert (signed.add("n", 1), signed.add("n", 0)) == (1, 1)
    assert signed.compare_set("a", "", "first") == b"first"
    assert signed.check(["a"])


def test_ranks_with_different_secrets_are_told_so(
    plain: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SHARDWELL_SECRET", SECRET)
    signed_where_secret(plain, "p", 0)
    signed_where_secret(plain, "p", 1)
    assert caplog.text == ""
    monkeypatch.delenv("SHARDWELL_SECRET")
    signed_where_secret(plain, "p", 2)
    assert "rank 2 has no secret, and the rank that came first has another" in caplog.text
    assert SECRET.encode().hex() not in str(plain.get("signed by"))


def agree_among_strangers(secret: str) -> str:
    """Two ranks agree on tokens while rank 1's hand also writes what a stranger would, straight into the store."""
    import os

    os.environ["SHARDWELL_SECRET"] = secret
    try:
        rank = dist.get_rank()
        agreement = Agreement(RankGroup(rank, 2, 2, "gloo"), 20.0, lambda: None)
        raw = dist.distributed_c10d._get_default_store()
        raw.set("shardwell/1/failure", "peer 1 a lie")
        dist.barrier()
        agreement.announce("gather a")
        agreement.meet("save")
        agreement.failures.check()
        dist.barrier()
        if rank == 1:
            agreement.fail(PeerError("the truth"))
        dist.barrier()
        try:
            agreement.failures.check()
        except (PeerError, DivergenceError) as error:
            return str(error)
        return ""
    finally:
        del os.environ["SHARDWELL_SECRET"]


def test_ranks_agree_and_fail_over_the_words_of_strangers(ranks: Ranks) -> None:
    heard, _ = ranks.run(2, agree_among_strangers, SECRET)
    assert heard.startswith("rank 1 failed first: the truth")
