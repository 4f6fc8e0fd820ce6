"""Token files: the batches of a corpus in memory, of any size, and refused where anything in them is off."""

from __future__ import annotations

import json
import os
import resource
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from tinyds41.tokenizer import BOS, EOS, Tokenizer
from tinyds41.train.corpus import Corpus, data_folder, documents
from tinyds41.train.evaluate import bits_per_character, unigram
from tinyds41.train.token_file import HEADER_BYTES, open_tokens, token_dtype, verify_tokens, write_text, write_tokens

TEXTS = ["To be.\n", "Or not to be? <eos>\n", "", "That is the question.\n" * 40]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(data_folder())


@pytest.fixture
def file(tokenizer, tmp_path) -> Path:
    write_tokens(tmp_path / "text.tokens", tokenizer, iter(TEXTS))
    return tmp_path / "text.tokens"


def edit(file: Path, **fields) -> None:
    """Changes the header and nothing else."""
    data = file.read_bytes()
    header = json.dumps(json.loads(data[:HEADER_BYTES]) | fields).encode()
    file.write_bytes(header.ljust(HEADER_BYTES) + data[HEADER_BYTES:])


def test_batches_are_those_of_the_texts_in_memory(tokenizer, file):
    memory, mapped = Corpus.from_texts(tokenizer, TEXTS), Corpus.from_file(tokenizer, file)
    assert len(mapped) == len(memory) and mapped.characters == memory.characters == sum(map(len, TEXTS))
    pairs = [(corpus.batch(step, 5, 13, seed=2) for corpus in (memory, mapped)) for step in range(8)]
    pairs += list(zip(memory.in_order(3, 7), mapped.in_order(3, 7), strict=True))
    for one, other in pairs:
        assert one.ids.dtype == other.ids.dtype == one.documents.dtype == other.documents.dtype == torch.int64
        assert one.ids.numpy().tobytes() == other.ids.numpy().tobytes()
        assert one.documents.numpy().tobytes() == other.documents.numpy().tobytes()
    assert Corpus.from_file(tokenizer, file, packed=False).batch(0, 2, 9).documents is None


def test_every_token_knows_its_document(tokenizer, file):
    """Also an empty text is one, of two tokens."""
    memory, mapped = Corpus.from_texts(tokenizer, TEXTS), Corpus.from_file(tokenizer, file)
    assert mapped.documents[:].tolist() == memory.documents.tolist()
    assert mapped.documents[5:9].tolist() == memory.documents[5:9].tolist()
    assert mapped.n_documents == memory.n_documents == 4
    assert Corpus(memory.ids).n_documents == 1


def test_evaluation_counts_alike(tokenizer, file):
    memory, mapped = Corpus.from_texts(tokenizer, TEXTS), Corpus.from_file(tokenizer, file)
    assert torch.equal(unigram(mapped.ids, 1024), unigram(memory.ids, 1024))
    assert bits_per_character(2.0, mapped) == bits_per_character(2.0, memory)


def test_the_file_is_a_plain_header_and_plain_numbers(tokenizer, file):
    data, found = file.read_bytes(), open_tokens(file, tokenizer)
    header = json.loads(data[:HEADER_BYTES])
    assert data[HEADER_BYTES - 1 : HEADER_BYTES] == b"\n"
    assert (header["version"], header["dtype"], header["documents"]) == (1, "uint16", 4)
    assert header["tokenizer"] == tokenizer.fingerprint and header["vocab_size"] == tokenizer.vocab_size
    ids = np.frombuffer(data, "<u2", header["tokens"], HEADER_BYTES)
    assert ids.tolist() == [i for text in TEXTS for i in (BOS, *tokenizer.encode(text), EOS)]
    starts = np.frombuffer(data[-8 * 4 :], "<i8")
    assert ids[starts].tolist() == [BOS] * 4 and (ids[starts[1:] - 1] == EOS).all()
    assert (HEADER_BYTES + 2 * len(ids) + 7) // 8 * 8 + 8 * 4 == len(data)
    assert dict(found.header) == header


@pytest.mark.parametrize(("vocab_size", "dtype"), [(260, "uint16"), (65536, "uint16"), (65537, "uint32")])
def test_numbers_are_as_wide_as_the_vocabulary_needs(vocab_size, dtype):
    assert token_dtype(vocab_size) == dtype


def test_wide_ids_come_back(tokenizer, tmp_path):
    class Wide(Tokenizer):
        vocab_size = 70_000

        def encode(self, text):
            return [69_999, 65_536, 4]

    file = tmp_path / "wide.tokens"
    write_tokens(file, Wide(tokenizer.backend), ["x"])
    corpus = Corpus.from_file(Wide(tokenizer.backend), file)
    assert corpus.ids[:].tolist() == [BOS, 69_999, 65_536, 4, EOS]


def test_texts_come_one_at_a_time(tokenizer, tmp_path):
    """When a text is asked for, those before it are encoded and gone: no list of them is held."""
    alive = []

    class Text(str):
        __slots__ = ("__weakref__",)

    def texts():
        for i in range(20):
            text = Text(f"text {i}")
            alive.append(weakref.ref(text))
            yield text
            del text
            assert sum(one() is not None for one in alive) <= 1

    assert write_tokens(tmp_path / "t", tokenizer, texts())["documents"] == 20


def test_only_the_windows_touched_are_read(tokenizer, tmp_path):
    """A file of 2.5e8 tokens, 500 MB that take a few blocks on disk: reading it would show in memory."""
    file = tmp_path / "huge.tokens"
    write_tokens(file, tokenizer, ["x"])
    tokens = 250_000_000
    edit(file, tokens=tokens)
    with file.open("r+b") as out:
        out.seek(HEADER_BYTES + 2 * tokens)
        out.write(np.array([0], "<i8").tobytes())
        out.truncate()
        out.seek(HEADER_BYTES + 2 * (tokens - 3))
        out.write(np.array([7, 8, 9], "<u2").tobytes())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    corpus = Corpus.from_file(tokenizer, file)
    for step in range(20):
        assert not corpus.batch(step, 8, 64).documents.any()
    assert corpus.ids[tokens - 4 : tokens].tolist() == [0, 7, 8, 9]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB; the tokens read are 20 KB
    assert file.stat().st_blocks * 512 < 100_000


def test_a_failed_writing_leaves_what_was_there(tokenizer, file):
    before = file.read_bytes()

    def texts():
        yield "one"
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        write_tokens(file, tokenizer, texts())
    assert file.read_bytes() == before and os.listdir(file.parent) == [file.name]
    with pytest.raises(ValueError, match="no documents"):
        write_tokens(file, tokenizer, [])
    assert os.listdir(file.parent) == [file.name]


def test_a_truncated_file_is_refused_with_both_sizes(tokenizer, file):
    data = file.read_bytes()
    for kept in (len(data) - 1, HEADER_BYTES + 10, HEADER_BYTES):
        file.write_bytes(data[:kept])
        with pytest.raises(ValueError, match=rf"text\.tokens has {kept} bytes, its header says {len(data)}"):
            open_tokens(file, tokenizer)
    file.write_bytes(data + b"\0")
    with pytest.raises(ValueError, match=rf"has {len(data) + 1} bytes, its header says {len(data)}"):
        open_tokens(file, tokenizer)


@pytest.mark.parametrize("data", [b"", b"To be, or not to be", b"[1]".ljust(HEADER_BYTES), b"\xff" * 9000,
                                  b'{"format": "other"}'.ljust(HEADER_BYTES)])  # fmt: skip
def test_a_file_that_holds_no_tokens_is_refused(tokenizer, tmp_path, data):
    file = tmp_path / "other"
    file.write_bytes(data)
    with pytest.raises(ValueError, match="other is not a token file"):
        open_tokens(file, tokenizer)
    with pytest.raises(FileNotFoundError, match=r"no token file .*missing"):
        open_tokens(tmp_path / "missing", tokenizer)


@pytest.mark.parametrize(("fields", "message"), [
    ({"version": 2}, "version=2, expected 1"),
    ({"dtype": "uint32"}, "dtype='uint32', expected 'uint16'"),
    ({"tokens": -1}, "tokens=-1"),
    ({"tokens": "9"}, "tokens='9'"),
    ({"documents": 0}, "documents=0"),
    ({"characters": None}, "characters=None"),
    ({"sha256": 3}, "sha256=3"),
    ({"vocab_size": 9}, "vocab_size=9, expected 1024"),
])  # fmt: skip
def test_a_header_that_says_nonsense_is_refused(tokenizer, file, fields, message):
    edit(file, **fields)
    with pytest.raises(ValueError, match=rf"text\.tokens: {message}"):
        open_tokens(file, tokenizer)


def test_another_tokenizer_is_refused_with_both_fingerprints(tokenizer, file):
    other = Tokenizer.train(TEXTS, 270)
    with pytest.raises(ValueError, match=rf"tokenizer='{tokenizer.fingerprint}', expected '{other.fingerprint}'"):
        Corpus.from_file(other, file)


def test_one_changed_byte_anywhere_is_found(tokenizer, file):
    verify_tokens(file, tokenizer)
    data = file.read_bytes()
    for place in (HEADER_BYTES, HEADER_BYTES + 333, len(data) - 40, len(data) - 1):
        file.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(ValueError, match=r"text\.tokens is damaged: its sha256 is \w{64}, its header says \w{64}"):
            verify_tokens(file, tokenizer)
    file.write_bytes(data)
    edit(file, characters=7)
    with pytest.raises(ValueError, match="is damaged"):
        verify_tokens(file, tokenizer)


def test_an_own_text_becomes_a_file_for_each_split(tokenizer, tmp_path):
    text = tmp_path / "mine.txt"
    text.write_text("".join(f"line {i}, né\n" for i in range(100)), encoding="utf-8")
    for split in ("train", "held_out"):
        write_text(tmp_path / split, tokenizer, text, split)
        made = Corpus.from_file(tokenizer, tmp_path / split)
        assert tokenizer.decode(made.ids[1 : len(made) - 1]) == documents(text, split)[0]
    text.write_bytes("né".encode("latin-1"))
    with pytest.raises(ValueError, match=r"mine\.txt is not UTF-8: byte 0xe9 at offset 1"):
        write_text(tmp_path / "train", tokenizer, text)
