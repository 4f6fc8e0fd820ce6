"""A variant has the weights of its model and another config."""

import pytest
import torch
from folders import nano_model, tokenizer_model

import tinyds41 as ds
from tinyds41.model.variant import twin
from tinyds41.trace import Trace

IDS = torch.arange(3, 27)[None]


def test_a_variant_without_changes_gives_the_same_logits():
    """With a tokenizer, whose token map is no weight."""
    model = tokenizer_model()
    assert torch.equal(ds.variant(model)(IDS), model(IDS))


def test_a_variant_behaves_as_its_config_says():
    model = nano_model()
    narrow = ds.variant(model, sliding_window=2)
    trace = Trace("layers.*.attn.window_first")
    narrow(IDS, trace=trace)
    assert (trace["layers.0.attn.window_first"][0] == (torch.arange(24) - 1).clamp(min=0)).all()
    assert not torch.allclose(narrow(IDS), model(IDS))


def test_a_variant_shares_the_weights_and_leaves_the_model_alone():
    model = nano_model()
    before, config = model(IDS), model.config
    other = ds.variant(model, quantize_cache=False)
    assert model.config is config and torch.equal(model(IDS), before)
    with torch.no_grad():
        other.head.weight.zero_()
    assert not model.head.weight.any()


def test_weights_that_a_variant_has_no_use_for_are_left_out():
    model = nano_model()
    assert model.config.engram_layer_ids
    other = ds.variant(model, engram_layer_ids=(), engram_num_embeddings=())
    assert not any("engram" in name for name in other.state_dict())
    assert other(IDS).isfinite().all()


def test_a_config_that_needs_other_weights_is_refused():
    model = nano_model()
    with pytest.raises(ValueError, match=r"vocab_size.* needs other weights .* 2 tensors: embed.weight"):
        ds.variant(model, vocab_size=model.config.vocab_size * 2, engram_layer_ids=(), engram_num_embeddings=())
    with pytest.raises(ValueError, match="unknown config field 'windows'"):
        ds.variant(model, windows=4)


def test_a_twin_has_the_very_parameters_of_its_model():
    """So an optimiser of the model moves both, by gradients of either."""
    model = tokenizer_model()
    other = twin(model, quantize_cache=False)
    assert all(p is model.get_parameter(name) for name, p in other.named_parameters())
    other(IDS).sum().backward()
    assert model.head.weight.grad.any() and model.config.quantize_cache and not other.config.quantize_cache
    assert torch.equal(other(IDS), ds.variant(model, quantize_cache=False)(IDS))


def test_a_drafter_is_shared_where_the_config_has_draft_blocks():
    model = nano_model(draft=True)
    other = ds.variant(model, quantize_cache=False)
    assert other.mtp is not None and other.mtp.config is other.config
    for name, weight in model.named_parameters():
        assert other.get_parameter(name).data_ptr() == weight.data_ptr(), name
    assert ds.variant(model, num_nextn_predict_layers=0, dspark_target_layer_ids=[]).mtp is None
    assert ds.variant(nano_model()).mtp is None
    assert twin(model).drafter.last.norm.weight is model.drafter.last.norm.weight
