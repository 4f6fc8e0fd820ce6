"""The shipped texts are the ones of the manifest, splits share nothing, batches depend on seed and step alone."""

from __future__ import annotations

import shutil

import pytest
import torch

from tinyds41.tokenizer import BOS, EOS, Tokenizer
from tinyds41.train import corpus
from tinyds41.train.corpus import Corpus, data_folder, documents, manifest, read_text, split_text, verify

SHIPPED = ("plays", "jargon", "devil")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(data_folder())


def test_the_shipped_files_match_the_manifest():
    verify()
    for name, entry in manifest().items():
        assert (data_folder() / name).stat().st_size == entry["bytes"]
        assert entry["source"] and entry["licence"] and "cut" in entry


def test_verify_names_every_changed_or_missing_file(tmp_path):
    folder = tmp_path / "data"
    shutil.copytree(data_folder(), folder)
    text = (folder / "devil.txt").read_text("utf-8")
    (folder / "devil.txt").write_text(text.replace("e", "E", 1), encoding="utf-8")
    (folder / "jargon.txt").unlink()
    with pytest.raises(ValueError, match=r"jargon\.txt: expected sha256 \w+, got no file; devil\.txt: expected"):
        verify(folder)


def test_the_data_folder_is_found_in_a_wheel_and_in_a_checkout(tmp_path, monkeypatch):
    module = tmp_path / "tinyds41" / "train" / "corpus.py"
    monkeypatch.setattr(corpus, "__file__", str(module))
    with pytest.raises(FileNotFoundError, match=r"no manifest\.json in .*tinyds41/data or "):
        data_folder()
    for folder in (tmp_path / "data", tmp_path / "tinyds41" / "data"):  # the wheel's wins, so it comes last
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
        assert data_folder() == folder.resolve()


@pytest.mark.parametrize(("name", "held_out_bytes"), [("plays", 96_000), ("jargon", 30_000), ("devil", 80_000)])
def test_the_held_out_part_is_the_end_of_the_file(name, held_out_bytes):
    entry = manifest()[f"{name}.txt"]
    held_out = documents(name, "held_out")
    train = [] if name == "devil" else documents(name)
    assert len(held_out) == entry["held_out_documents"]
    assert len(train) + len(held_out) == entry["documents"]
    assert not set(train) & set(held_out)
    assert "\f\n".join(train + held_out) == read_text(data_folder() / f"{name}.txt")
    assert sum(len(text.encode()) for text in held_out) > held_out_bytes


def test_a_whole_play_and_a_whole_letter_are_held_out():
    assert documents("plays", "held_out")[0].startswith("The Tempest\nACT I\n")
    assert not any("PROSPERO" in scene for scene in documents("plays"))
    assert {entry[0].upper() for entry in documents("jargon", "held_out")} == {"E"}
    assert {entry[0].upper() for entry in documents("jargon")} == set("ABCD")
    with pytest.raises(ValueError, match="devil has no train documents"):
        documents("devil", "train")


def test_the_texts_are_clean():
    for name in SHIPPED:
        text = read_text(data_folder() / f"{name}.txt")
        assert not set(text) & set("\r\t\0\xa0\xad\ufffd"), name
        assert not any(line != line.rstrip(" ") for line in text.split("\n")), name
        assert "dictfmt" not in text and "http://catb" not in text
    plays = read_text(data_folder() / "plays.txt")
    assert not set(plays) & set("_*\\#`")
    assert "\n\nHIPPOLYTA:\nFour days will quickly steep themselves in night;\n" in plays
    assert "\n\n[Exit PHILOSTRATE]\n\n" in plays


def test_unknown_names_and_splits_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no text file poems.*\['plays', 'jargon', 'devil'\]"):
        documents("poems")
    with pytest.raises(ValueError, match="split='test' is not one of"):
        documents("plays", "test")


def test_text_that_is_not_utf8_is_named_with_its_offset(tmp_path):
    file = tmp_path / "latin.txt"
    file.write_bytes("café\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8: byte 0xe9 at offset 3"):
        documents(file)


@pytest.mark.parametrize("data", [b"", b" \r\n\f\n", b"\xef\xbb\xbf\n"])
def test_a_file_without_text_is_refused(tmp_path, data):
    file = tmp_path / "blank.txt"
    file.write_bytes(data)
    with pytest.raises(ValueError, match=rf"blank\.txt has no text in its {len(data)} bytes"):
        read_text(file)


def test_reading_keeps_line_ends_and_drops_the_byte_order_mark(tmp_path):
    file = tmp_path / "windows.txt"
    file.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    assert read_text(file) == "one\r\ntwo\r\n"


def test_a_users_single_document_is_cut_at_a_line_end(tmp_path):
    file = tmp_path / "mine.txt"
    lines = [f"line {i}\n" for i in range(100)]
    file.write_text("".join(lines), encoding="utf-8")
    (train,), (held_out,) = documents(file, "train"), documents(str(file), "held_out")
    assert train + held_out == "".join(lines)
    assert held_out == "".join(lines[-len(held_out.splitlines()) :])
    assert 9 <= len(held_out.splitlines()) <= 10


def test_a_split_of_any_text_loses_nothing():
    for text in ("x" * 50 + "\n", "short\n" + "y" * 90 + "\n", "a\nb\n", "z" * 99 + "\nend\n"):
        (train,), (held_out,) = split_text(text)
        assert train + held_out == text and train and held_out
    train, held_out = split_text("\f".join(f"document {i}" for i in range(20)))
    assert (len(train), held_out) == (18, ["document 18\n", "document 19\n"])
    assert split_text("one\n\f\n\ntwo\n\f\n \n") == (["one\n"], ["two\n"])


def test_documents_are_laid_out_with_their_borders(tokenizer):
    texts = ["To be.\n", "Or not to be? <eos>\n"]
    made = Corpus.from_texts(tokenizer, texts)
    first, second = ([BOS, *tokenizer.encode(text), EOS] for text in texts)
    assert made.ids.tolist() == first + second
    assert made.documents is not None
    assert made.documents.tolist() == [0] * len(first) + [1] * len(second)
    assert made.characters == sum(map(len, texts))
    assert Corpus.from_texts(tokenizer, texts, packed=False).documents is None


def test_a_batch_is_windows_of_the_text_and_of_its_documents():
    made = Corpus(torch.arange(100, 150, dtype=torch.int32), torch.arange(50, dtype=torch.int32) // 7)
    ids, borders, wanted = made.batch(3, 64, 9, seed=5)
    assert wanted is None and borders is not None
    assert ids.shape == borders.shape == (64, 10) and ids.dtype == borders.dtype == torch.int64
    assert torch.equal(ids, ids[:, :1] + torch.arange(10))
    assert torch.equal(borders, (ids - 100) // 7)


def test_batches_depend_on_seed_and_step_alone():
    made = Corpus(torch.arange(1000, dtype=torch.int32))
    whole = [made.batch(step, 4, 16, seed=1).ids for step in range(6)]
    resumed = [Corpus(made.ids.clone()).batch(step, 4, 16, seed=1).ids for step in (5, 4, 3)]
    assert all(torch.equal(a, b) for a, b in zip(resumed, whole[:2:-1], strict=True))
    starts = {tuple(ids[:, 0].tolist()) for ids in whole}
    assert len(starts) == 6
    assert not torch.equal(whole[0], made.batch(0, 4, 16, seed=2).ids)
    # (seed, step) and (step, seed) are different draws: a sum or a product of the two would tie them.
    assert not torch.equal(made.batch(1, 4, 16, seed=2).ids, made.batch(2, 4, 16, seed=1).ids)


def test_every_start_can_be_drawn_and_none_runs_over_the_end():
    made = Corpus(torch.arange(12, dtype=torch.int32))
    starts = {start for step in range(40) for start in made.batch(step, 8, 9).ids[:, 0].tolist()}
    assert starts == {0, 1, 2}
    assert made.batch(0, 2, 11).ids.tolist() == [list(range(12))] * 2


def test_in_order_predicts_each_token_once():
    made = Corpus(torch.arange(48, dtype=torch.int32))
    batches = list(made.in_order(4, 5))
    targets = [token for batch in batches for token in batch.ids[:, 1:].flatten().tolist()]
    assert targets == list(range(1, 46))  # 9 windows; the last two tokens fill no sixth of a window
    assert [len(batch.ids) for batch in batches] == [4, 4, 1]


def test_a_text_too_short_for_one_sequence_is_named():
    made = Corpus(torch.arange(9, dtype=torch.int32))
    with pytest.raises(ValueError, match="a text of 9 tokens is too short for a sequence of length 9"):
        made.batch(0, 1, 9)
    with pytest.raises(ValueError, match="9 tokens"):
        next(iter(made.in_order(1, 20)))


def test_bad_shapes_are_named(tokenizer):
    with pytest.raises(ValueError, match=r"expected ids \[T\], got shape \(2, 3\)"):
        Corpus(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"documents \(4,\) do not match ids \(3,\)"):
        Corpus(torch.zeros(3), torch.zeros(4))
    with pytest.raises(ValueError, match="no documents"):
        Corpus.from_texts(tokenizer, [])


def test_the_manifest_lists_what_is_in_the_folder():
    files = (path for path in data_folder().rglob("*") if path.is_file())
    found = {path.relative_to(data_folder()).as_posix() for path in files}
    assert found == {*manifest(), "manifest.json", "README.md", "curate.py"}


def test_the_readme_counts_what_the_manifest_counts():
    rows = {line.split("`")[1]: line for line in read_text(data_folder() / "README.md").splitlines() if "| `" in line}
    for name in SHIPPED:
        entry = manifest()[f"{name}.txt"]
        assert f"| {entry['documents']} " in rows[entry["file"]]
        assert f"({entry['held_out_documents']} " in rows[entry["file"]] or name == "devil"


@pytest.mark.parametrize("length", [0, -5])
def test_a_sequence_without_tokens_is_refused(length):
    with pytest.raises(ValueError, match=f"length={length}: at least 1 token"):
        Corpus(torch.arange(9).int()).batch(0, 2, length)
