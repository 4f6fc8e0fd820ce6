"""Round trips are exact, special ids stay out of user text, and the compressed map is the golden one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tinyds41.tokenizer import BOS, EOS, NOISE, PAD, Tokenizer, normalised

GOLDEN = Path(__file__).parent / "golden"
TEXT = ["the cat and the hat sat; THE CAT and the rat.\n", "Then the Théâtre, then the theatre.\n"] * 5


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(TEXT, 290)


@pytest.fixture(scope="module")
def golden() -> Tokenizer:
    return Tokenizer.load(GOLDEN / "engram_tokenizer.json")


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "  the  cat\n\n", "a\r\nb\rc\n", "nul\0and\x7f\x1b", "<eos><bos> <pad>", "\ufffd"),
        *("深度求索：你好，世界。", "🧠👩🏽\u200d🔬🇨🇳", "e\u0301 \u00e9 \ufeff\u00a0\u3000"),
        *("\U0010ffff\ud7ff", "tab\tand \u2028 separators\x85"),
    ],
)
def test_any_text_comes_back_exactly(tokenizer, golden, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert golden.decode(golden.encode(text)) == text


def test_special_ids_are_the_first_four(tokenizer):
    assert [tokenizer.decode([i]) for i in (BOS, EOS, PAD, NOISE)] == ["<bos>", "<eos>", "<pad>", "<noise>"]
    assert (BOS, EOS, PAD, NOISE) == (0, 1, 2, 3)
    assert tokenizer.vocab_size == 290


def test_special_names_in_a_text_are_plain_text(tokenizer):
    ids = tokenizer.encode("stop<eos>here<noise>")
    assert min(ids) > NOISE
    assert tokenizer.decode(ids, special=False) == "stop<eos>here<noise>"


def test_decode_can_leave_special_tokens_out(tokenizer):
    ids = [BOS, *tokenizer.encode("the cat"), EOS, PAD]
    assert tokenizer.decode(ids) == "<bos>the cat<eos><pad>"
    assert tokenizer.decode(torch.tensor(ids), special=False) == "the cat"


def test_arbitrary_ids_decode(tokenizer):
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        assert isinstance(tokenizer.decode(torch.randint(290, (20,), generator=generator)), str)
    half_character = tokenizer.encode("é")[:1]
    assert tokenizer.decode(half_character) == "\ufffd"


@pytest.mark.parametrize("outside", [290, -1, 2**40])
def test_an_id_outside_the_vocabulary_is_named(tokenizer, outside):
    with pytest.raises(ValueError, match=f"{outside} is outside the vocabulary of 290"):
        tokenizer.decode([5, outside])


def test_a_lone_surrogate_is_refused_with_its_place(tokenizer):
    with pytest.raises(ValueError, match="position 2"):
        tokenizer.encode("ab\ud800")


def test_compressed_map_equals_the_golden(golden):
    expected = load_file(GOLDEN / "engram_unit.safetensors")["compressed_map"].long()
    actual = golden.compressed_map()
    assert actual.dtype == torch.int64
    assert torch.equal(actual, expected)
    assert golden.compressed_vocab_size == 260


@pytest.mark.parametrize(
    ("text", "key"),
    [("  The ", "the"), (" ", " "), ("\n\n", " "), (" \t\r\n ", " "), ("É", "e"), ("ﬁ", "fi"), ("Ａ", "a"),
     ("a \n b", "a b"), ("\u00a0", " "), ("\u3000\u3000", " "), ("\u0301", "\u0301"), ("\x0b", "\x0b"),
     ("ΑΣ", "ασ"), ("", "")],
)
def test_normalisation_follows_the_rule(text, key):
    assert normalised(text) == key


def test_compressed_ids_are_numbered_by_first_appearance(tokenizer):
    ids = tokenizer.compressed_map().tolist()
    first = list(dict.fromkeys(ids))
    assert first == list(range(tokenizer.compressed_vocab_size))
    assert tokenizer.compressed_vocab_size < tokenizer.vocab_size
    the, spaced = tokenizer.encode("the cat the")[0], tokenizer.encode("the cat the")[-1]
    assert the != spaced and ids[the] == ids[spaced]


def test_training_twice_gives_the_same_file(tokenizer, tmp_path):
    Tokenizer.train(iter(TEXT), 290).save(tmp_path)
    assert json.loads((tmp_path / "tokenizer.json").read_text("utf-8")) == json.loads(tokenizer.backend.to_str())


def test_save_and_load_by_folder_and_by_file(tokenizer, tmp_path):
    assert tokenizer.save(tmp_path / "new") == tmp_path / "new" / "tokenizer.json"
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["tokenizer.json"]
    for path in (tmp_path / "new", str(tmp_path / "new" / "tokenizer.json")):
        loaded = Tokenizer.load(path)
        assert loaded.encode("the cat <eos>") == tokenizer.encode("the cat <eos>")
        assert torch.equal(loaded.compressed_map(), tokenizer.compressed_map())


def test_load_errors_name_the_path(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no tokenizer at .*nowhere/tokenizer\.json"):
        Tokenizer.load(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=f"{tmp_path}/tokenizer.json is not a tokenizer"):
        Tokenizer.load(tmp_path)


def test_a_vocabulary_without_room_for_the_bytes_is_refused():
    with pytest.raises(ValueError, match="vocab_size=259 is below 260"):
        Tokenizer.train(TEXT, 259)
    assert Tokenizer.train(TEXT, 260).vocab_size == 260


@pytest.mark.parametrize("ids", [torch.tensor([[5, 6]]), torch.tensor(5), torch.tensor([5.0])])
def test_decode_refuses_a_tensor_that_is_no_row_of_ids(ids):
    with pytest.raises(ValueError, match=r"expected ids \[S\] of whole numbers"):
        Tokenizer.train([], 260).decode(ids)


def test_a_fingerprint_is_that_of_words_and_merges(tokenizer, golden, tmp_path):
    """The same after saving; another when one entry or the order of two merges is another."""
    tokenizer.save(tmp_path)
    assert Tokenizer.load(tmp_path).fingerprint == tokenizer.fingerprint != golden.fingerprint
    assert len(tokenizer.fingerprint) == 64
    content = json.loads(tokenizer.backend.to_str())
    words, merges = dict(content["model"]["vocab"]), list(content["model"]["merges"])
    last, before = sorted(words, key=words.get)[-2:]
    for changed in ({"vocab": {**words, last: words[before], before: words[last]}},
                    {"merges": [merges[1], merges[0], *merges[2:]]}):  # fmt: skip
        (tmp_path / "tokenizer.json").write_text(json.dumps({**content, "model": {**content["model"], **changed}}))
        assert Tokenizer.load(tmp_path).fingerprint != tokenizer.fingerprint
