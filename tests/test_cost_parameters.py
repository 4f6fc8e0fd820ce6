"""The parameter count adds up, hits the published figures and fits every kind of config."""

import argparse
import json
import resource

import pytest

from tinyds41.config import Config, preset_names
from tinyds41.cost import params_command
from tinyds41.cost.parameters import COMPONENTS, component_of, count_parameters, shares, short
from tinyds41.model.transformer import Model


@pytest.fixture(scope="module")
def flash():
    return count_parameters(Config.preset("flash"))


@pytest.fixture
def command(capsys):
    """Runs `tinyds41 params` with arguments and returns what it printed."""
    parser = argparse.ArgumentParser()
    params_command.add_parser(parser.add_subparsers(dest="command"))

    def run(*argv: str) -> str:
        assert params_command.run(parser.parse_args(["params", *argv])) == 0
        return capsys.readouterr().out

    return run


def without_engram(config: Config) -> Config:
    return config.replace(engram_layer_ids=(), engram_num_embeddings=())


def without_decoder(config: Config) -> Config:
    return without_engram(config).replace(
        compress_ratios=(0, 0, 2, 2, 2, 2, 2, 2), kv_source_layer_ids=(2,), index_source_layer_ids=(2, 6),
        candidate_source_layer_id=None)  # fmt: skip


def test_flash_has_the_published_figures(flash):
    # 551.57B, 196.61B, 0.315B, 7.89B, 16.13B, to the digits that are published.
    assert round(flash.backbone / 1e9, 2) == 551.57
    assert round(flash.engram_rows / 1e9, 2) == 196.61
    assert round(flash.engram_projections / 1e9, 3) == 0.315
    assert round(flash.active_prefill / 1e9, 2) == 7.89
    assert round(flash.active_decode / 1e9, 2) == 16.13


def test_flash_agrees_with_its_sizes_by_hand(flash):
    """The hand count of the released sizes: 385 experts of 3 x 5120 x 2304, rows of 256, D x V."""
    experts = flash["routed experts"].stored + flash["shared expert"].stored
    assert experts == 40 * 385 * 3 * 5120 * 2304
    assert flash["Engram rows"].stored == (384_006_168 + 384_016_682) * 256
    assert flash["token embedding"].stored == flash["output head"].stored == 129_280 * 5120
    queries, outputs = 5120 * 1280 + 1280 + 1280 * 64 * 512, 64 * 512 * 1024 + 8 * 1024 * 5120
    assert flash["attention"].stored == 40 * (queries + 5120 * 512 + 512 + outputs + 64)


def test_counting_flash_allocates_no_weights():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    count_parameters(Config.preset("flash"))
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 200_000  # one layer's experts alone would be 27 GB in bf16; modules and primes take a few MB


@pytest.mark.parametrize("name", preset_names())
def test_components_add_up_to_the_model(name):
    config = Config.preset(name)
    counted = count_parameters(config)
    assert counted.total == sum(p.numel() for p in Model(config, device="meta").parameters())
    assert counted.total == counted.backbone + counted.engram_rows + counted.engram_projections
    assert [part.name for part in counted.components] == list(COMPONENTS)


def test_no_token_uses_look_up_tables_or_idle_experts():
    config = Config.preset("nano")
    for part in shares(Model(config, device="meta")):
        if part.name == "embed.weight" or part.name.endswith(("engram.embed.weight", "bias_vl")):
            assert part.decode == part.prefill == 0, part.name
        elif part.component == "routed experts":
            assert part.decode * config.n_routed_experts == part.stored * config.num_experts_per_tok
        else:
            assert part.decode == part.stored, part.name


def test_a_prompt_token_uses_the_encoder_half_only():
    model = Model(Config.preset("nano"), device="meta")
    for part in shares(model):
        inside = part.name.startswith(tuple(f"layers.{layer}." for layer in range(4)))
        assert part.prefill == (part.decode if inside else 0), part.name
    # The boundary layer's global projections are left to the decoder, the head to decode.
    boundary = [p for p in shares(model) if p.name.startswith(("layers.4.compressor", "layers.4.indexer", "head"))]
    assert len(boundary) == 7 and not any(p.prefill for p in boundary)


def test_without_a_decoder_a_prompt_token_uses_all_layers():
    counted = count_parameters(without_decoder(Config.preset("nano")))
    outside = counted["output head"].decode + Config.preset("nano").hidden_size  # the norm in front of the head
    assert counted.active_prefill == counted.active_decode - outside
    assert "no decoder" in str(counted) and "encoder half" not in str(counted)


def test_without_engram_its_lines_vanish_from_the_table():
    counted = count_parameters(without_engram(Config.preset("nano")))
    assert counted.engram_rows == counted.engram_projections == 0
    assert counted.backbone == counted.total and "Engram rows" not in str(counted)


def test_draft_blocks_stand_apart_from_the_backbone(flash, command):
    """By hand: three blocks of attention and 129 experts, router, norms and mixing; features in, two heads out."""
    counted = count_parameters(Config.preset("flash"), draft=True)
    attention, experts = flash["attention"].stored // 40, 129 * 3 * 5120 * 2304
    router, mixing, norms = 128 * 5120 + 2 * 128, 2 * (24 * 4 * 5120 + 24 + 3), 2 * 5120
    heads = 3 * 5120 * 5120 + 5120 + 5120 + 2 * 129_280 * 256 + 5120 + 256
    assert counted.draft_blocks == 3 * (attention + experts + router + mixing + norms) + heads
    for total in ("backbone", "engram_rows", "engram_projections", "active_prefill", "active_decode"):
        assert getattr(counted, total) == getattr(flash, total)
    assert flash.draft_blocks == 0 and "draft" not in str(flash)
    text = command("--preset", "flash", "--draft")
    words = [line.split()[:5] for line in text.splitlines()]
    assert ["draft", "blocks", short(counted.draft_blocks), "the", "drafter;"] in words
    assert "all but Engram and draft blocks" in text


def test_a_name_without_a_component_is_an_error():
    with pytest.raises(ValueError, match=r"layers\.0\.mystery"):
        component_of("layers.0.mystery")


def test_short_counts():
    assert [short(n) for n in (551_566_180_464, 314_654_720, 8192, 999, 0)] == [
        "551.57B", "314.65M", "8.19K", "999", "0"]  # fmt: skip


def test_the_command_prints_a_table_that_says_what_it_includes(command, flash):
    text = command("--preset", "flash")
    for figure in ("551.57B", "196.61B", "314.65M", "7.89B", "16.13B"):
        assert figure in text
    assert "no head, no look-ups, no global KV of the boundary layer" in text
    assert max(map(len, text.splitlines())) <= 130  # a terminal line


def test_the_command_prints_raw_counts_as_json(command, flash, tmp_path):
    config = Config.preset("nano")
    config.to_json(tmp_path / "config.json")
    content = json.loads(command("--config", str(tmp_path / "config.json"), "--json"))
    assert content == count_parameters(config).to_dict()
    assert isinstance(content["active_decode"], int) and len(content["components"]) == len(COMPONENTS)


def test_the_command_names_an_unknown_preset(command):
    with pytest.raises(ValueError, match=r"'flsh'.*nano, toy, small, flash"):
        command("--preset", "flsh")
