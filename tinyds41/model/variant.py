"""The same weights under another config: what a switch or a size that needs no training does to a trained model."""

from __future__ import annotations

from typing import Any

from tinyds41.model.transformer import Model


def variant(model: Model, **changes: Any) -> Model:
    """A model with `changes` in its config and the weights of `model`, which both then share.

    `variant(model, quantize_cache=False)`, `variant(model, sliding_window=4)`. Weights that the new config has no use
    for, such as Engram's without Engram layers, are left out; a drafter stays where the config has draft blocks. Tables
    that lie in files are shared too.

    Raises: ValueError naming a config field that is wrong, or the weights that the new config lacks.
    """
    config = model.config.replace(**changes)
    outside = {layer: engram.embed for layer, engram in model.engrams.items()
               if not engram.owns_table and layer in config.engram_layer_ids}  # fmt: skip
    draft = model.mtp is not None and config.num_nextn_predict_layers > 0
    other = Model(config, tokenizer=model.tokenizer, device="meta", engram=outside, draft=draft)
    weights, wanted = model.state_dict(), other.state_dict()
    misfits = [name for name, weight in wanted.items() if name not in weights or weights[name].shape != weight.shape]
    if misfits:
        raise ValueError(f"{changes} needs other weights than the model has, in {len(misfits)} tensors: {misfits[0]}")
    other.load_state_dict({name: weights[name] for name in wanted}, assign=True)
    buffers = dict(model.named_buffers(remove_duplicate=False))  # one map serves all tables
    for layer, engram in other.engrams.items():
        engram.token_map = buffers[f"layers.{layer}.engram.token_map"]  # derived, so in no state
    return other


def twin(model: Model, **changes: Any) -> Model:
    """A variant whose parameters are those of `model` themselves, not others with the same values.

    Gradients of either add up in both. What is done to the parameters of one, such as `double()`, is done to both.

    Raises: ValueError as `variant`.
    """
    other = variant(model, **changes)
    own = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        if name in own:
            path, _, leaf = name.rpartition(".")
            setattr(other.get_submodule(path), leaf, parameter)
    return other
