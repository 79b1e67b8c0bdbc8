"""Sizes in bytes, as users write them: parsed and printed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recycle_pp.config.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16GB", 16e9),
        ("80 GiB", 80 * 2**30),
        ("512MiB", 512 * 2**20),
        ("1.5k", 1500),
        ("2e9", 2e9),
        ("7b", 7),
        ("1", 1),
    ],
)
def test_units_of_1000_and_of_1024_are_parsed(text: str, size: float) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "0", "16 parsecs", "1e999", "nan", "1.2.3GB"])
def test_any_other_text_is_rejected_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size above 0, like 16GB, 512MiB or 2e9"):
        parse_size(text)


@given(st.floats(1, 9e17))
def test_a_printed_size_parses_back_to_three_digits(size: float) -> None:
    assert parse_size(format_size(size)) == pytest.approx(size, rel=0.006)
