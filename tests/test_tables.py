"""Columns line up, words to the left and numbers to the right."""

import pytest

from tinyds41.tables import aligned


def test_words_start_and_numbers_end_at_the_edge_of_their_column():
    assert aligned(("name", "n", "note"), [("a", "1,024", "x"), ("longer", "7", "")], left=(0, 2)) == [
        "name        n  note",
        "a       1,024  x",
        "longer      7",
    ]


def test_by_default_only_the_first_column_holds_words():
    assert aligned(("a", "wide"), [("b", "1")]) == ["a  wide", "b     1"]


def test_a_table_without_rows_is_its_head():
    assert aligned(("a", "b"), []) == ["a  b"]


def test_a_row_with_other_columns_is_named():
    with pytest.raises(ValueError, match=r"a row of 1 cells under 2 columns: \('x',\)"):
        aligned(("a", "b"), [("x",)])
