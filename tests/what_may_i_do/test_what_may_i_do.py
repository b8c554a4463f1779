"""What people do to models works or says so, and the page in docs is what the run finds.

Each operation runs at stage 3 and at others in turn (`in_turn`); `python -m tests.what_may_i_do` runs all at each.
"""

from __future__ import annotations

import pytest

from tests.support.ranks import Ranks
from tests.what_may_i_do.operations import OPERATIONS
from tests.what_may_i_do.page import PAGE, failures, found, in_turn, read, written
from tests.what_may_i_do.performing import COLUMNS, Result

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]  # the first one runs all operations


@pytest.fixture(scope="module")
def results(ranks: Ranks) -> dict[str, dict[str, Result]]:
    return {column: found(ranks, column, operations) for column, operations in in_turn().items()}


def test_names_are_given_once() -> None:
    names = [operation.name for operation in OPERATIONS]
    assert len(set(names)) == len(names)


def test_every_operation_works_or_says_so(results: dict[str, dict[str, Result]]) -> None:
    assert not failures(results), "\n".join(failures(results))


def test_operations_are_at_stage_3_and_each_section_is_at_each_stage() -> None:
    turns = in_turn()
    assert turns["3"] == OPERATIONS
    sections = {operation.section for operation in OPERATIONS}
    assert all({operation.section for operation in turns[column]} == sections for column in COLUMNS)


def test_the_page_is_what_is_found(results: dict[str, dict[str, Result]]) -> None:
    page = PAGE.read_text()
    unknown = {operation.name: Result("fails", "the page has no such line") for operation in OPERATIONS}
    both = {column: {**unknown, **said, **results[column]} for column, said in read(page).items()}
    assert page == written(both), "run python -m tests.what_may_i_do"
