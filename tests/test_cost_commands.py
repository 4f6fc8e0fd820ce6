"""`tinyds41 bytes` and `tinyds41 flops`: the headline numbers, any config, and one clear line for bad input."""

import json
import re

import pytest

from tinyds41.cli import main
from tinyds41.config import Config
from tinyds41.cost.flops import decode_cost
from tinyds41.cost.flops_command import metric
from tinyds41.cost.generations import GENERATIONS
from tinyds41.cost.kv_bytes import kv_bytes
from tinyds41.cost.prefill import prefill_cost
from tinyds41.cost.traffic import DecodeTraffic


@pytest.fixture
def command(capsys):
    """Runs the command and returns what it printed."""

    def run(*argv: str) -> str:
        assert main(argv) == 0
        return capsys.readouterr().out

    return run


def row(text: str, start: str) -> list[str]:
    """The cells of the first line that begins with these words."""
    line = next(line for line in text.splitlines() if line.startswith(start))
    return re.split(r"\s{2,}", line.strip())


def test_bytes_compares_all_generations(command):
    text = command("bytes")
    shown = {name: row(text, name + " ")[1] for name in GENERATIONS}
    assert list(shown.values()) == ["389,120", "69,120", "70,272", "48,068", "3,514.25", "5,031.4375", "890"]
    assert row(text, "V4-Flash ")[2] == "3,214,336"
    assert "V4-Pro, assumed: 30 layers of ratio 4 and 31 of ratio 128" in text


def test_bytes_of_a_preset_shows_stores_reads_and_mixing(command):
    text = command("bytes", "--preset", "flash", "--context", "65536")
    assert str(kv_bytes(Config.preset("flash"))) in text
    read = DecodeTraffic(Config.preset("flash")).at(65_536)
    held = kv_bytes(Config.preset("flash")).bytes_at(65_536)
    assert row(text, " 65,536") == ["65,536", *(f"{n:,}" for n in (
        held, read.weights, read.window_rows, read.global_rows, read.index_keys, 12_672, read.total))]  # fmt: skip
    assert "20 (V4 kernels), 14 (two-pass), 10 (single-pass)" in text


def test_bytes_of_an_earlier_generation_shows_what_a_row_is_made_of(command):
    text = command("bytes", "--generation", "V3.2")
    assert "a row of KV: 512 x 8 bit latent + 4 x 32 bit scales + 64 x 16 bit rotary" in text
    assert "an index key: 128 x 8 bit codes + 1 x 32 bit scale" in text
    assert row(text, "global KV") == ["global KV", "61", "656", "1", "40,016"]
    assert row(text, "all")[-1] == "48,068"


def test_flops_compares_all_generations_under_both_accountings(command):
    text = command("flops")
    grown = [line.split(": ")[1] for line in text.splitlines() if line.startswith("growth")]
    assert [[f"{name} {n}" in line for line, n in zip(grown, numbers, strict=True)] for name, numbers in {
        "V3.2": ("10.25", "8.07"), "V4-Flash": ("4.89", "3.87"), "V4-Pro": ("2.79", "2.65"),
        "V4.1-Flash": ("1.61", "1.28")}.items()] == [[True, True]] * 4  # fmt: skip
    assert "(linear), FP8 0.5 (index scores): V3.2" in text
    assert "The reports do not print their own accounting." in text


def test_flops_of_a_config_shows_decode_and_every_prefill_mode(command):
    text = command("flops", "--preset", "flash", "--accounting", "raw")
    assert "raw: " in text and "weighted" not in text
    assert row(text, "bounded")[:3] == ["bounded", "4,096", "0.516"]
    assert row(text, "full ")[-1] == "1.000"
    work = decode_cost(Config.preset("flash")).at(4096)
    assert row(text, "flash")[1:] == ["4,096", *map(metric, (work.linear, work.index_full, work.index_pool,
                                                             work.attention, work.total))]  # fmt: skip


def test_flops_at_one_context_has_no_growth(command):
    text = command("flops", "--generation", "V4-Flash", "--context", "8192")
    assert "growth" not in text and "8,192" in text and "bounded" not in text


@pytest.mark.parametrize("argv", [
    ["bytes"], ["flops"], ["bytes", "--preset", "flash"], ["flops", "--preset", "flash"],
    ["bytes", "--generation", "V3"],
])  # fmt: skip
def test_tables_line_up_and_fit_a_terminal(command, argv):
    lines = command(*argv).splitlines()
    assert max(map(len, lines)) <= 130
    assert not any(line.endswith(" ") for line in lines)
    heads = [i for i, line in enumerate(lines) if line.startswith(("model", "one generated", "prompt "))]
    for head in heads:  # the last column ends at the same place in every row of its table
        table = [lines[head]]
        for line in lines[head + 1 :]:
            if not line or line.startswith("growth"):
                break
            table.append(line)
        assert len({len(line) for line in table}) == 1


def test_json_of_a_file_holds_raw_counts(command, tmp_path):
    config = Config.preset("nano", engram_layer_ids=(), engram_num_embeddings=())  # like no preset
    config.to_json(tmp_path / "config.json")
    source = ("--config", str(tmp_path / "config.json"), "--context", "9", "--json")
    stores = json.loads(command("bytes", *source))
    assert stores["rows"] == json.loads(json.dumps(kv_bytes(config).to_dict()["rows"]))
    [at] = stores["at"]
    assert (at["context"], at["held"]) == (9, kv_bytes(config).bytes_at(9))
    assert at["read"]["total"] == DecodeTraffic(config).at(9).total and at["read"]["engram_rows"] == 0
    work = json.loads(command("flops", *source))["accountings"]["weighted"]
    assert work["decode"][0]["rows"][0]["total"] == decode_cost(config).at(9, "weighted").total
    assert [row["total"] for row in work["prefill"]] == [
        prefill_cost(config).at(9, mode, "weighted").total for mode in ("full", "exact", "bounded")]  # fmt: skip


def test_json_of_all_generations(command):
    stores = json.loads(command("bytes", "--context", "65536", "--json"))["models"]
    assert [model["model"] for model in stores] == list(GENERATIONS)
    assert stores[4]["bytes_per_token"] == 3514.25 and isinstance(stores[0]["bytes_per_token"], int)
    work = json.loads(command("flops", "--accounting", "raw", "--json"))["accountings"]
    assert list(work) == ["raw"]
    assert [round(model["growth"], 2) for model in work["raw"]["decode"]][3:] == [10.25, 4.89, 2.79, 1.61]


def test_a_cache_of_plain_floats_is_held_and_read_in_one_dtype(command, tmp_path):
    config = Config.preset("nano", quantize_cache=False)
    config.to_json(tmp_path / "config.json")
    [at] = json.loads(command("bytes", "--config", str(tmp_path / "config.json"), "--context", "1", "--json"))["at"]
    # One token fills the windows' first row and the ratio-1 source's first entry; its key is scored, its row attended.
    assert at["held"] == 2 * (8 * config.head_dim + config.head_dim + config.index_head_dim)
    assert at["read"]["window_rows"] == 2 * 8 * config.head_dim


def test_a_small_model_starts_at_its_window(command):
    assert [at["context"] for at in json.loads(command("bytes", "--preset", "nano", "--json"))["at"]] == [4, 256]


@pytest.mark.parametrize("name", ["bytes", "flops"])
@pytest.mark.parametrize(("argv", "named"), [
    (["--context", "0"], "context=0: a sequence has at least one token"),
    (["--preset", "nano", "--context", "257"], "context=257 exceeds max_position_embeddings=256"),
    (["--generation", "V3", "--context", "1048577"], "context=1048577 exceeds max_position_embeddings=1048576"),
    (["--generation", "V9"],
     "unknown generation 'V9': the generations are V1, V2, V3, V3.2, V4-Flash, V4-Pro, V4.1-Flash"),
    (["--preset", "flsh"], "unknown preset 'flsh': the presets are nano, toy, small, flash"),
])  # fmt: skip
def test_bad_input_takes_one_line(capsys, name, argv, named):
    assert main([name, *argv]) == 2
    assert capsys.readouterr().err == f"tinyds41: error: {named}\n"


@pytest.mark.parametrize("name", ["bytes", "flops"])
def test_a_config_of_another_architecture_takes_one_line(capsys, tmp_path, name):
    other = {"model_type": "llama", "vocab_size": 32_000, "hidden_size": 4096, "num_hidden_layers": 32}
    (tmp_path / "config.json").write_text(json.dumps(other))
    assert main([name, "--config", str(tmp_path / "config.json")]) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1 and "config.json: not a config of this architecture: missing " in shown
    assert main([name, "--config", str(tmp_path / "gone.json")]) == 2
    assert "gone.json" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--preset", "nano", "--generation", "V3"], ["--context", "many"]])
def test_a_call_that_argparse_refuses_exits_with_2(argv):
    with pytest.raises(SystemExit, match="2"):
        main(["bytes", *argv])


def test_metric_counts():
    assert [metric(n) for n in (3.4e15, 1.5e12, 32.26e9, 83.886e6, 8192, 999, 0)] == [
        "3.40P", "1.50T", "32.26G", "83.89M", "8.19K", "999", "0"]  # fmt: skip
