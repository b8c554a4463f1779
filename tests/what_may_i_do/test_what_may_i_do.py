"""What people do to models works or says so, at each stage, and the page in docs is what the run finds."""

from __future__ import annotations

import pytest

from tests.support.ranks import Ranks
from tests.what_may_i_do.operations import OPERATIONS
from tests.what_may_i_do.page import PAGE, Result, failures, found, written
from tests.what_may_i_do.performing import COLUMNS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]  # the first one runs all operations at all stages


@pytest.fixture(scope="module")
def results(ranks: Ranks) -> dict[str, dict[str, Result]]:
    return {column: found(ranks, column) for column in COLUMNS}


def test_names_are_given_once() -> None:
    names = [operation.name for operation in OPERATIONS]
    assert len(set(names)) == len(names)


def test_every_operation_works_or_says_so(results: dict[str, dict[str, Result]]) -> None:
    assert not failures(results), "\n".join(failures(results))


def test_the_page_is_what_is_found(results: dict[str, dict[str, Result]]) -> None:
    assert PAGE.read_text() == written(results), "run python -m tests.what_may_i_do"
