"""The JSON text of a checkpoint is strict, and is refused in a sentence, soon, whatever else it is."""

from __future__ import annotations

import pytest

from shardwell.checkpoint import Manifest
from shardwell.checkpoint.parsing import MAX_DIGITS, parse_json
from shardwell.errors import CheckpointError


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "not valid JSON"),
        ("[]", "expected a JSON object at the top, found []"),
        ("null", "found null"),
        (b"\xff", "not text in UTF-8"),
        ("[" * 100_000, "nested too deeply"),
        ('{"version": NaN}', "NaN is not a finite number"),
        ('{"version": -Infinity}', "-Infinity is not a finite number"),
        ('{"version": 1e400}', "1e400 is not a finite number"),
        ('{"version": 1' + "0" * 2000 + "}", "a number of 2001 digits"),
        ('{"version": 1, "version": 1}', '"version": written twice'),
        ('{"a": [{"b": 1, "b": 2}]}', '"b": written twice'),
    ],
)
def test_text_that_is_no_strict_json_is_refused(text: str | bytes, sentence: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        Manifest.from_json(text, "here")
    assert str(caught.value).startswith("here: ")
    assert sentence in str(caught.value)


@pytest.mark.parametrize("before", [0, 1, 499, 500, 501, 999])
def test_a_number_is_too_long_wherever_in_the_text_it_is(before: int) -> None:
    allowed, too_long = "7" * MAX_DIGITS, "7" * (MAX_DIGITS + 1)
    assert parse_json(f"{' ' * before}[{allowed}]", "here") == [int(allowed)]
    with pytest.raises(CheckpointError, match=f"here: a number of {MAX_DIGITS + 1} digits"):
        parse_json(f"{' ' * before}[{too_long}]", "here")


def test_a_long_text_of_digits_is_no_number() -> None:
    assert parse_json(f'["{"7" * 5000}", 1]', "here") == ["7" * 5000, 1]


def test_a_key_that_is_repeated_among_very_many_is_found_at_once() -> None:
    keys = ", ".join(f'"{number}": 1' for number in range(200_000))  # in time that is quadratic: hours
    with pytest.raises(CheckpointError, match='"199999": written twice'):
        parse_json(f'{{{keys}, "199999": 1}}', "here")
