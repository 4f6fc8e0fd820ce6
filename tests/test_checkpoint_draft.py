"""Draft blocks on disk: their released names, read strictly when asked for, skipped when not."""

import logging
import re

import pytest
import torch
from folders import assert_same_bits, edit_tensors, index_of, nano_model, released

from tinyds41.checkpoint.inspect import inspect
from tinyds41.checkpoint.read import load, load_draft
from tinyds41.checkpoint.write import save, save_draft
from tinyds41.model.dspark import DSpark


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(nano_model(draft=True), tmp_path_factory.mktemp("drafting") / "model")


def test_the_released_names_of_draft_blocks(folder):
    """Spec 13: by hand for what stands once, and what each block has."""
    names = {name for name in index_of(folder) if name.startswith("mtp.")}
    once = {"mtp.0.main_proj.weight", "mtp.0.main_norm.weight", "mtp.2.norm.weight", "mtp.2.markov_head.embed.weight",
            "mtp.2.markov_head.head.weight", "mtp.2.confidence_head.proj.weight"}  # fmt: skip
    attention = [f"attn.{name}.weight" for name in ("wq_a", "q_norm", "wq_b", "wkv", "kv_norm", "wo_a", "wo_b")]
    experts = [f"ffn.{name}.{w}.weight" for name in ("shared_experts", *(f"experts.{e}" for e in range(4)))
               for w in ("w1", "w2", "w3")]  # fmt: skip
    others = ["attn.attn_sink", "ffn.gate.weight", "ffn.gate.bias", "ffn.gate.bias_vl", "attn_norm.weight",
              "ffn_norm.weight", *(f"hc_{site}_{part}" for site in ("attn", "ffn") for part in ("fn", "base", "scale"))]
    each = {f"mtp.{block}.{name}" for block in range(3) for name in (*attention, *experts, *others)}
    assert names == once | each


def test_a_saved_drafter_comes_back_bit_for_bit_when_asked_for(folder):
    model = load(folder, draft=True)
    assert isinstance(model.mtp, DSpark)
    assert_same_bits(released(model), released(nano_model(draft=True)))


def test_it_is_skipped_with_a_notice_when_not(folder, caplog):
    with caplog.at_level(logging.WARNING):
        model = load(folder)
    assert model.mtp is None and re.fullmatch(r"model: skipped \d+ of mtp\.\*", caplog.messages[0])
    assert_same_bits(released(model), {k: v for k, v in released(nano_model(draft=True)).items() if k[:4] != "mtp."})


def test_quantised_it_keeps_its_dense_matrices_in_tiles_and_its_heads_as_they_are(tmp_path):
    """Saved, loaded and saved again it is the same; heads and features' projection stay in the model's dtype (ours)."""
    folder = save(nano_model(draft=True), tmp_path / "first", quantize=True)
    model = load(folder, draft=True)
    stored = {group.name: group.format for group in inspect(folder).groups if group.component == "draft blocks"}
    assert stored["mtp.*.attn.wkv.weight"] == "fp8 tiles" and stored["mtp.*.ffn.experts.*.w1.weight"] == "packed fp4"
    for name in ("main_proj", "markov_head.embed", "markov_head.head", "confidence_head.proj", "norm"):
        assert stored[f"mtp.*.{name}.weight"] == "F32"
    again = load(save(model, tmp_path / "again", quantize=True), draft=True)
    assert_same_bits(released(again), released(model))


def test_missing_and_unexpected_tensors_of_a_drafter_are_named(tmp_path):
    folder = save(nano_model(draft=True), tmp_path / "model")
    extra = {"mtp.1.attn.compressor.wkv.weight": torch.ones(2), "mtp.3.norm.weight": torch.ones(2)}
    edit_tensors(folder, lambda tensors: (tensors.pop("mtp.1.attn.wkv.weight"), tensors.update(extra)))
    with pytest.raises(ValueError) as error:
        load(folder, draft=True)
    assert "missing (1): mtp.1.attn.wkv.weight" in str(error.value)
    assert "unexpected (2): mtp.1.attn.compressor.wkv.weight, mtp.3.norm.weight" in str(error.value)
    assert load(folder).mtp is None


def test_a_folder_without_draft_blocks_says_what_is_missing(tmp_path):
    folder = save(nano_model(), tmp_path / "model")
    with pytest.raises(ValueError, match=r"missing \(\d+\): mtp\.0\."):
        load(folder, draft=True)


def test_a_drafter_of_another_model_in_the_folder_is_named(tmp_path):
    """Its Markov head is for another vocabulary."""
    other = released(nano_model(draft=True, vocab_size=70, engram_compressed_vocab_size=70))
    folder, own = save(nano_model(draft=True), tmp_path / "model"), {k: v for k, v in other.items() if k[:4] == "mtp."}
    edit_tensors(folder, lambda tensors: tensors.update(own))
    with pytest.raises(ValueError) as error:
        load(folder, draft=True)
    assert "misshaped" in str(error.value) and "is (70, 8), expected (64, 8)" in str(error.value)


def test_first_layers_without_a_target_layer_have_no_drafter(folder):
    with pytest.raises(ValueError, match=r"range\(0, 6\) with draft=True: its target layers \[6, 7\] are missing"):
        load(folder, layers=range(0, 6), draft=True)
    assert load(folder, layers=range(0, 6)).config.num_nextn_predict_layers == 0


def test_first_layers_with_all_target_layers_keep_the_drafter(tmp_path):
    folder = save(nano_model(draft=True, dspark_target_layer_ids=[1, 3]), tmp_path / "model")
    model = load(folder, layers=range(0, 5), draft=True)
    assert model.mtp is not None and len(model.layers) == 5 and model.config.dspark_target_layer_ids == (1, 3)
    assert_same_bits(model.mtp.state_dict(), load(folder, draft=True).drafter.state_dict())


def test_a_config_without_draft_blocks_has_none_to_load(tmp_path):
    folder = save(nano_model(num_nextn_predict_layers=0, dspark_target_layer_ids=[]), tmp_path / "model")
    with pytest.raises(ValueError, match="num_nextn_predict_layers=0: this config has no draft blocks"):
        load(folder, draft=True)


def test_inspect_counts_the_drafter_by_itself(folder):
    report = inspect(folder)
    parameters = sum(weight.numel() for weight in nano_model(draft=True).drafter.parameters())
    assert report.components()["draft blocks"][0] == parameters
    assert "3 of 3 draft blocks stored" in str(report) and report.n_draft_blocks == 3


def test_a_drafter_saved_alone_is_added_to_its_backbone_bit_for_bit(tmp_path):
    model, backbone = nano_model(draft=True), nano_model()
    model.config = model.config.replace(dspark_temperatures=(1.0, 2.0, 0.5, 1.0, 1.0))
    folder = save_draft(model, tmp_path / "alone")
    assert all(name.startswith("mtp.") for name in index_of(folder))
    draft = load_draft(backbone, folder)
    assert draft is backbone.mtp and backbone.config == model.config
    assert_same_bits(released(backbone), released(model))


def test_a_drafter_alone_of_another_model_is_refused_with_the_sizes(tmp_path):
    folder = save_draft(nano_model(draft=True), tmp_path / "alone")
    other = nano_model(sliding_window=8)
    with pytest.raises(ValueError, match=r"belongs to another model: sliding_window=4 there and 8 here$"):
        load_draft(other, folder)
    assert other.mtp is None
    with pytest.raises(ValueError, match="has no drafter"):
        save_draft(other, tmp_path / "none")


def test_a_drafter_alone_without_a_tensor_is_refused_by_its_name(tmp_path):
    folder = save_draft(nano_model(draft=True), tmp_path / "alone")
    edit_tensors(folder, lambda tensors: tensors.pop("mtp.0.main_proj.weight"))
    backbone = nano_model()
    with pytest.raises(ValueError, match=r"missing.*mtp\.0\.main_proj\.weight"):
        load_draft(backbone, folder)
    assert backbone.mtp is None
