"""The shipped tokenizer is what its script makes of the shipped texts; a refit enters its checksum."""

from __future__ import annotations

import json
import shutil

import pytest

from tinyds41.tokenizer import Tokenizer
from tinyds41.train import corpus, fit_tokenizer
from tinyds41.train.corpus import data_folder, verify
from tinyds41.train.fit_tokenizer import VOCAB_SIZE, bytes_per_token, fit, main


def test_the_shipped_tokenizer_is_reproduced_by_its_script():
    shipped = Tokenizer.load(data_folder())
    assert shipped.vocab_size == VOCAB_SIZE
    assert json.loads(fit(VOCAB_SIZE).backend.to_str()) == json.loads(shipped.backend.to_str())


def test_a_larger_vocabulary_means_fewer_tokens():
    small, large = fit(300, ["jargon"]), fit(600, ["jargon"])
    assert 1 < bytes_per_token(small, "jargon") < bytes_per_token(large, "jargon")


def test_held_out_text_is_not_trained_on(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("seen seen seen\n" * 9 + "\f\nunheard unheard unheard\n", encoding="utf-8")
    tokenizer = fit(400, [str(file)])
    assert len(tokenizer.encode(" seen")) == 1 and len(tokenizer.encode(" unheard")) == 8


def test_a_refit_of_the_shipped_file_keeps_the_folder_verified(tmp_path, monkeypatch, capsys):
    folder = (tmp_path / "data").resolve()
    shutil.copytree(data_folder(), folder)
    for module in (corpus, fit_tokenizer):
        monkeypatch.setattr(module, "data_folder", lambda: folder)
    main(["--vocab-size", "300", "--text", "jargon", "--out", str(folder)])
    verify(folder)
    files = json.loads((folder / "manifest.json").read_text("utf-8"))["files"]
    assert [entry["file"] for entry in files].count("tokenizer.json") == 1
    assert Tokenizer.load(folder).vocab_size == 300
    assert "devil: " in capsys.readouterr().out
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: expected"):
        verify(folder)
