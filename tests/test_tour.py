"""The tour end to end on a few steps, and what it refuses before it trains."""

from __future__ import annotations

import csv
import re

import pytest
import torch

from tinyds41.checkpoint.read import load
from tinyds41.course.report import Report
from tinyds41.course.tour import TourOptions, tour


@pytest.fixture(scope="module")
def toured(tmp_path_factory):
    """A tour of three steps: (folder, lines that it said)."""
    out, lines = tmp_path_factory.mktemp("tour"), []
    tour(TourOptions(steps=3, out=out), say=lines.append)
    return out, lines


def test_the_tour_leaves_a_model_that_loads_with_its_tokenizer(toured):
    model = load(toured[0] / "model")
    ids = torch.tensor([model.tokenizer.encode("To be, or not to be")])
    assert model(ids).isfinite().all()


def test_the_report_shows_every_figure_in_both_forms(toured):
    folder = toured[0]
    names = {path.stem for path in (folder / "figures").glob("*.svg")}
    assert names == {"loss", "layer_plan", "kv_bytes", "selection", "expert_load", "parameters_toy",
                     "parameters_flash", "decode_work"}  # fmt: skip
    for text in ((folder / "report.md").read_text(), (folder / "report.html").read_text()):
        shown = set(re.findall(r"figures/(\w+)\.svg", text))
        assert shown == names
    for name in names:
        assert (folder / "figures" / f"{name}.png").stat().st_size > 5_000  # an empty canvas is smaller
        with (folder / "figures" / f"{name}.csv").open() as file:
            assert len(list(csv.DictReader(file))) > 1 or name == "loss"


def test_the_tour_says_the_released_cache_bytes(toured):
    """890 bytes per token and 2,703,360 of windows, from encoded rows (numbers of the report)."""
    assert any("flash: 890 bytes per token" in line and "2,703,360" in line for line in toured[1])


def test_the_tour_states_how_flat_decode_is(toured):
    """Growth from 4K to 1M: 1.61 raw and 1.28 weighted."""
    assert any("raw work grows 1.61 times, weighted work grows 1.28 times" in line for line in toured[1])


def test_an_output_folder_that_cannot_be_made_is_refused_before_training(tmp_path):
    (tmp_path / "file").write_text("in the way")
    lines: list[str] = []
    with pytest.raises(OSError, match=r"file.* cannot be written"):
        tour(TourOptions(steps=1, out=tmp_path / "file"), say=lines.append)
    assert not lines


def test_a_text_that_is_not_utf8_is_refused_by_name(tmp_path):
    (tmp_path / "latin.txt").write_bytes("caf\u00e9 ".encode("latin-1") * 1000)
    with pytest.raises(ValueError, match=r"latin\.txt"):
        tour(TourOptions(steps=1, text=str(tmp_path / "latin.txt"), out=tmp_path / "out"), say=print)


def test_a_text_too_short_for_one_sequence_is_refused(tmp_path):
    (tmp_path / "short.txt").write_text("Too short.\n" * 9)
    with pytest.raises(ValueError, match="256"):
        tour(TourOptions(steps=1, text=str(tmp_path / "short.txt"), out=tmp_path / "out"), say=print)


def test_a_text_whose_held_out_part_is_too_short_is_refused_before_training(tmp_path):
    """The last tenth of 150 lines has no sequence of 256 tokens, the rest has."""
    (tmp_path / "short.txt").write_text("A line of a few words, no more.\n" * 150)
    lines: list[str] = []
    with pytest.raises(ValueError, match="too short for a sequence of length 256"):
        tour(TourOptions(steps=1, text=str(tmp_path / "short.txt"), out=tmp_path / "out"), say=lines.append)
    assert not lines


def test_a_device_that_is_not_there_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="device 'abacus' cannot be used"):
        tour(TourOptions(steps=1, device="abacus", out=tmp_path / "out"), say=print)


def test_a_report_escapes_what_html_would_read_as_markup(tmp_path):
    report = Report("a < b", tmp_path)
    report.say("<script>alert(1)</script>")
    paths = report.write()
    assert "<script>" not in paths[1].read_text() and "&lt;script&gt;" in paths[1].read_text()


@pytest.mark.parametrize("foreign", ["model/note.txt", "figures"])
def test_a_foreign_file_in_the_way_is_refused_before_training(tmp_path, foreign):
    """The model is saved last: minutes of training would end in the error."""
    (tmp_path / foreign).parent.mkdir(exist_ok=True)
    (tmp_path / foreign).write_text("in the way")
    lines: list[str] = []
    with pytest.raises(OSError, match=r"note\.txt|figures cannot be written"):
        tour(TourOptions(steps=1, out=tmp_path), say=lines.append)
    assert not lines
