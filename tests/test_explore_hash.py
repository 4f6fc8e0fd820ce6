"""The hash explorer names the rows that the model reads, and every other n-gram that reads them too."""

import html
import sys
from pathlib import Path

import pytest
import torch
from models import NANO, PAD, random_ids, scattered, traced

import tinyds41 as ds
from tinyds41.model.engram import multipliers, table_primes
from tinyds41.show.explore_hash import HashedRow, explore_hash, hash_view, hashed_rows
from tinyds41.tokenizer import Tokenizer

GOLDEN = Path(__file__).parent / "golden"
TEXT = random_ids(1, 60)[0].tolist()
LAYER = 3


@pytest.fixture(scope="module")
def model():
    return scattered()


@pytest.fixture(scope="module")
def speaking():
    """A model with a tokenizer whose compressed ids are fewer than its ids."""
    tokenizer = Tokenizer.load(GOLDEN / "engram_tokenizer.json")
    assert tokenizer.compressed_vocab_size < tokenizer.vocab_size
    config = NANO.replace(vocab_size=tokenizer.vocab_size, engram_compressed_vocab_size=tokenizer.compressed_vocab_size)
    return ds.Model(config, tokenizer=tokenizer)


def engram(model, layer: int = LAYER):
    return model.layers[layer].engram


def slow_address(compressed: tuple[int, ...], column: int, table: int = 1) -> int:
    """The address of one n-gram, oldest first, in whole numbers of Python."""
    primes = table_primes(NANO)[table]
    layer = NANO.engram_layer_ids[table]
    mixed = 0
    for factor, token in zip(multipliers(layer, NANO.engram_compressed_vocab_size, 4).tolist(), compressed[::-1],
                             strict=False):  # fmt: skip
        mixed ^= factor * token
    return mixed % primes[column] + sum(primes[:column])


def slow_ngrams(ids: list[int], order: int) -> list[tuple[int, ...]]:
    """One per token; what is missing before the text is the pad."""
    padded = [PAD] * (order - 1) + list(ids)
    return [tuple(padded[end : end + order]) for end in range(len(ids))]


# ---------------------------------------------------------------------------------------------- rows


def test_rows_and_collisions_are_those_of_the_formula(model):
    """The identity map: compressed ids are ids, a missing token is the pad."""
    rows = hashed_rows(engram(model), [TEXT])
    assert [(row.order, row.head, row.column) for row in rows] == [(2 + c // 2, c % 2, c) for c in range(6)]
    assert [row.prime for row in rows] == table_primes(NANO)[1]
    for row in rows:
        ngrams = slow_ngrams(TEXT, row.order)
        assert row.ngram == ngrams[-1] and row.row == slow_address(ngrams[-1], row.column)
        assert row.seen == ngrams.count(ngrams[-1])
        expected = [ngram for ngram in dict.fromkeys(ngrams)
                    if ngram != ngrams[-1] and slow_address(ngram, row.column) == row.row]  # fmt: skip
        assert [tuple(PAD if t < 0 else t for t in ngram) for ngram in row.collisions] == expected
    assert sum(len(row.collisions) for row in rows) > 3  # 60 n-grams in tables of 50 rows do meet
    assert not any(a.row == b.row for a in rows for b in rows if a is not b)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 21])
def test_the_rows_are_those_the_model_reads(model, length):
    ids = TEXT[:length]
    read = traced(model, torch.tensor([ids]), f"layers.{LAYER}.engram.rows")[f"layers.{LAYER}.engram.rows"][0, -1]
    assert [row.row for row in hashed_rows(engram(model), [ids])] == read.tolist()


def test_a_short_text_reads_the_pad_before_it(model):
    assert [row.ngram for row in hashed_rows(engram(model), [[9]])][::2] == [(-1, 9), (-1, -1, 9), (-1, -1, -1, 9)]
    blocked = hashed_rows(engram(model), [[7, 8, PAD, 9]])
    assert [row.row for row in blocked] == [row.row for row in hashed_rows(engram(model), [[9]])]
    assert blocked[-1].ngram == (-1, -1, -1, 9)


def test_a_second_text_is_a_document_of_its_own(model):
    """Its first token follows nothing, and what it adds is counted and compared."""
    first, second = TEXT[:5], [*TEXT[5:40], *TEXT[2:5]]
    alone, both = (hashed_rows(engram(model), texts) for texts in ([first], [first, second]))
    assert [row.row for row in both] == [row.row for row in alone]
    assert [row.seen for row in both] == [2, 2, 2, 2, 1, 1]  # the last three tokens stand in it again, not four
    for row in both:
        known = slow_ngrams(first, row.order) + slow_ngrams(second, row.order)
        met = {tuple(PAD if t < 0 else t for t in ngram) for ngram in row.collisions}
        assert met == {n for n in known if slow_address(n, row.column) == row.row} - {row.ngram}
    assert sum(len(row.collisions) for row in both) > sum(len(row.collisions) for row in alone)
    assert hashed_rows(engram(model), [[7, 7], [7]])[0].seen == 1  # the third 7 follows nothing


def test_words_that_differ_in_case_only_are_the_same_ngram(speaking):
    """They read the same row on purpose: seen, not a collision."""
    encode = speaking.tokenizer.encode
    lower, upper = encode("the cat"), encode("The Cat")
    token_map = speaking.tokenizer.compressed_map()
    assert lower != upper and token_map[lower[:1]].tolist() == token_map[upper[:1]].tolist()
    ids = [lower[0], lower[0], 50, upper[0], upper[0], 60, lower[0], upper[0]]
    [pair, *_] = hashed_rows(engram(speaking), [ids])
    assert pair.seen == 3
    assert all(token_map[list(n)].tolist() != token_map[ids[-2:]].tolist() for n in pair.collisions if min(n) >= 0)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "the text is empty"),
        ([4, 64], r"id 64 is out of range: ids are 0\.\.63"),
        ([-1], "id -1 is out of range"),
    ],
)
def test_ids_that_have_no_last_token_or_no_row_are_refused(model, ids, message):
    with pytest.raises(ValueError, match=message):
        hash_view(model, ids)


# ---------------------------------------------------------------------------------------------- static twin


def test_the_view_is_a_line_per_column(model):
    among = random_ids(1, 200, seed=1)[0].tolist()
    lines = hash_view(model, TEXT, among=among, layer=LAYER).splitlines()
    assert lines[0] == "layers.3.engram: 304 rows in 6 columns; n-grams of 260 tokens compared" and not lines[1]
    assert lines[2].split()[:7] == ["order", "n-gram", "seen", "head", "column", "prime", "row"]
    for line, row in zip(lines[3:], hashed_rows(engram(model), [TEXT, among]), strict=True):
        ngram = "|".join(map(str, row.ngram))
        numbers = [str(n) for n in (row.seen, row.head, row.column, row.prime, row.row)]
        assert line.split()[:7] == [str(row.order), ngram, *numbers]
        shared = line.split(maxsplit=7)[7]
        named, more = row.collisions[:2], len(row.collisions) - 2
        shown = "  ".join("|".join("(pad)" if t < 0 else str(t) for t in ngram) for ngram in named) or "-"
        assert shared == shown + (f" and {more} more" if more > 0 else "")
    assert any(line.endswith(" more") for line in lines)
    assert all(line.endswith("  -") for line in hash_view(model, [9]).splitlines()[3:])


def test_a_text_is_encoded_by_the_models_tokenizer(speaking):
    text = "the cat\nand The dog"
    ids = speaking.tokenizer.encode(text)
    assert hash_view(speaking, text) == hash_view(speaking, ids)
    assert "layers.1.engram" in hash_view(speaking, text)  # the first Engram layer
    assert hash_view(speaking, text, among="a cat and a dog") == hash_view(
        speaking, ids, among=speaking.tokenizer.encode("a cat and a dog"))  # fmt: skip
    shown = speaking.tokenizer.decode(ids[-1:]).strip()
    assert shown and any(f"{shown} " in line for line in hash_view(speaking, text).splitlines()[3:])
    assert "↵" in hash_view(speaking, "the\n")


def test_without_a_tokenizer_a_text_is_ids(model):
    assert hash_view(model, "5 9 9") == hash_view(model, [5, 9, 9])
    with pytest.raises(ValueError, match="'the' is no token id: the model has no tokenizer"):
        hash_view(model, "5 the 9")


def test_a_layer_without_engram_is_refused(model):
    with pytest.raises(ValueError, match=r"layer=2 has no Engram: engram_layer_ids=\[1, 3\]"):
        hash_view(model, TEXT, layer=2)
    without = ds.Model(NANO.replace(engram_layer_ids=[], engram_num_embeddings=[]))
    for call in (lambda: hash_view(without, TEXT), lambda: explore_hash(without, "5")):
        with pytest.raises(ValueError, match="the model has no Engram layer"):
            call()


# ---------------------------------------------------------------------------------------------- widget


def parts(box) -> dict:
    rows, picture, text = box.children
    return {**{control.description: control for control in rows.children}, "picture": picture, "shown": text}


def test_typing_and_choosing_change_the_table_to_that_of_the_view(speaking):
    pytest.importorskip("ipywidgets")
    among = "the cat and the dog and the bird"
    found = parts(explore_hash(speaking, "a cat", among=among))
    assert html.escape(hash_view(speaking, "a cat", among=among, layer=1)) in found["shown"].value
    found["text"].value = "a dog"
    assert html.escape(hash_view(speaking, "a dog", among=among, layer=1)) in found["shown"].value
    found["layer"].value = LAYER
    assert html.escape(hash_view(speaking, "a dog", among=among, layer=LAYER)) in found["shown"].value
    assert found["picture"].layout.display == "none" and found["shown"].layout.display == ""
    assert not found["text"].continuous_update and list(found["layer"].options) == [1, 3]


def test_an_empty_line_shows_why_and_a_tag_is_text(speaking):
    pytest.importorskip("ipywidgets")
    found = parts(explore_hash(speaking, "a"))
    found["text"].value = ""
    assert "the text is empty" in found["shown"].value
    found["text"].value = "<b>"
    assert "&gt;" in found["shown"].value and "<b>" not in found["shown"].value


def test_without_ipywidgets_the_explorer_names_the_extra(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    with pytest.raises(ImportError, match=r"pip install 'tinyds41\[notebooks\]'"):
        explore_hash(model, "5")
    assert isinstance(hashed_rows(engram(model), [TEXT])[0], HashedRow)
