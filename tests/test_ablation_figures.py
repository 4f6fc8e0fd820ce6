"""The page of ablations: every file that is there, its numbers and its figures, nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tinyds41.show import ablation_figures as module
from tinyds41.train.ablate import summary
from tinyds41.train.ablations import ABLATIONS


def content(name: str, subject: str, **numbers: list[float]) -> dict:
    variants = ABLATIONS[name].variants[:2]
    rows = [{"variant": variant.name, "seed": seed, "seconds": 3.0, **{key: v[seed] + i for key, v in numbers.items()}}
            for i, variant in enumerate(variants) for seed in (0, 1)]  # fmt: skip
    recipe = json.loads(json.dumps({**ABLATIONS[name].to_dict(), "subject": subject, "steps": None}))
    return {"name": name, "threads": 1, "torch": "2", "recipe": recipe, "date": "2026-12-01", "device": "cpu",
            "command": f"tinyds41 ablate {name}", "rows": rows, "summary": summary(rows)}  # fmt: skip


@pytest.fixture
def docs(tmp_path):
    (tmp_path / "results").mkdir()
    ced = content("ced", "text", held_out_loss=[4.0, 4.2], bytes_per_token=[52.5, 52.5])
    top = content("top-k", "long-needle", right=[0.5, 0.7], mass_in_selection=[0.1, 0.2])
    for one in (ced, top):
        (tmp_path / "results" / f"ablate_{one['name']}.json").write_text(json.dumps(one))
    (tmp_path / "results" / "decode.json").write_text("{}")
    module.main(["--docs", str(tmp_path)])
    return tmp_path


def test_the_page_has_mean_and_spread_of_every_variant(docs):
    page = (docs / "ablations.md").read_text()
    assert "| encoder-decoder | 4.100 ± 0.141 | 52.5 |" in page
    assert "| decoder alone | 5.100 ± 0.141 | 53.5 |" in page
    assert "| 2 of 252 | 0.600 ± 0.141 | 0.150 ± 0.071 |" in page
    for name in ("ced", "top-k"):
        assert ABLATIONS[name].question in page and ABLATIONS[name].unseen in page and f"tinyds41 ablate {name}" in page
    assert "streams" not in page and "seconds" not in page


def test_the_figures_that_the_page_shows_are_there_with_their_numbers(docs):
    names = ("ablation_ced", "ablation_top-k", "ablation_top-k_mass")
    made = {path.name for path in (docs / "figures").iterdir()}
    assert made == {f"{name}.{kind}" for name in names for kind in ("png", "svg", "csv")}
    assert all(f"figures/{name}.png" in (docs / "ablations.md").read_text() for name in names)
    lines = (docs / "figures" / "ablation_ced.csv").read_text().splitlines()
    assert lines[:2] == ["variant,seed,held_out_loss", "encoder-decoder,0,4.0"] and len(lines) == 5


def test_a_variant_whose_queries_left_nothing_out_has_no_place_over_its_mass(tmp_path):
    (tmp_path / "results").mkdir()
    pool = content("pool", "long-needle", right=[0.5, 0.7], mass_in_pool=[0.1, 0.2])
    for row in pool["rows"][2:]:
        del row["mass_in_pool"]
    (tmp_path / "results" / "ablate_pool.json").write_text(json.dumps({**pool, "summary": summary(pool["rows"])}))
    module.main(["--docs", str(tmp_path)])
    lines = (tmp_path / "figures" / "ablation_pool_mass.csv").read_text().splitlines()
    assert lines == ["variant,seed,mass_in_pool,right", "1 of 63 blocks,0,0.1,0.5", "1 of 63 blocks,1,0.2,0.7"]
    assert "| 4 of 63 blocks | 1.600 ± 0.141 |  |" in (tmp_path / "ablations.md").read_text()


def test_without_any_result_it_says_what_makes_one(tmp_path):
    with pytest.raises(FileNotFoundError, match="tinyds41 ablate NAME"):
        module.main(["--docs", str(tmp_path)])


def test_the_committed_page_is_that_of_the_committed_results(tmp_path):
    """Text alone: pictures may differ by a version of the drawing library."""
    root = Path(__file__).parents[1] / "docs"
    files = sorted((root / "results").glob("ablate_*.json"))
    (tmp_path / "results").mkdir()
    for file in files:
        (tmp_path / "results" / file.name).write_text(file.read_text())
    module.main(["--docs", str(tmp_path)])
    assert (tmp_path / "ablations.md").read_text() == (root / "ablations.md").read_text()
