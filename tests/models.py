"""Models for the tests: toy A with its golden weights, and small ones whose every weight matters."""

from __future__ import annotations

import torch
from goldens import dspark, toy_a
from torch import Tensor

from tinyds41.checkpoint.names import to_released
from tinyds41.config import Config
from tinyds41.model.context import Sequence
from tinyds41.model.transformer import Model
from tinyds41.trace import Trace

NANO = Config.preset("nano")
PAD = 2  # nano's engram_pad_token_id; random_ids draws none


def toy_a_model(dtype: torch.dtype, **changes) -> Model:
    """Toy A with the weights of its goldens, which name each tensor of the model and no other."""
    config, weights = toy_a(dtype, **changes)
    model = Model(config, dtype=dtype)
    ours = to_released(model.state_dict())
    assert ours.keys() == weights.keys()
    with torch.no_grad():
        for name, tensor in ours.items():
            assert tensor.shape == weights[name].shape, name
            tensor.copy_(weights[name])
    return model


def dspark_model(dtype: torch.dtype, **changes) -> Model:
    """A model whose draft blocks, embedding and head have the weights of the drafter's goldens."""
    config, weights = dspark(dtype, **changes)
    model = Model(config, dtype=dtype, draft=True)
    ours = to_released(model.state_dict())
    assert {name for name in ours if name.startswith("mtp.")} == {name for name in weights if name.startswith("mtp.")}
    with torch.no_grad():
        for name, weight in weights.items():
            assert ours[name].shape == weight.shape, name
            ours[name].copy_(weight)
    return model


def scatter(module: torch.nn.Module, size: float = 0.2, seed: int = 0) -> None:
    """Moves every weight by noise: a sink, a bias or a norm left at its initial 0 or 1 hides a missing term."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * size)


def scattered(config: Config = NANO, dtype: torch.dtype = torch.float64, **options) -> Model:
    """A model with random weights in all places."""
    model = Model(config, dtype=dtype, **options)
    scatter(model)
    return model


def uneven(config: Config = NANO) -> Model:
    """In float64, with non-zero sinks and weights so large that attention is far from even."""
    model, generator = Model(config, dtype=torch.float64, seed=1), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("attn_sink"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
            elif parameter.ndim == 2 and ".attn." in name:
                parameter.mul_(8)
    return model


def reached(model: Model) -> set[str]:
    """The parameters that have a gradient other than zero."""
    return {name for name, p in model.named_parameters() if p.grad is not None and p.grad.count_nonzero()}


def window_only(n_layers: int = 2, **changes) -> Config:
    """Nano without compressed layers and Engram: attention sees its window, nothing else crosses tokens."""
    return NANO.replace(
        num_hidden_layers=n_layers, compress_ratios=[0] * n_layers, kv_source_layer_ids=[], index_source_layer_ids=[],
        candidate_source_layer_id=None, engram_layer_ids=[], engram_num_embeddings=[], num_nextn_predict_layers=0,
        dspark_target_layer_ids=[], **changes)  # fmt: skip


def random_ids(rows: int, length: int, config: Config = NANO, seed: int = 0) -> Tensor:
    """Ids [rows, length] without special tokens."""
    return torch.randint(4, config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))


def clear_choice(logits: Tensor, noise: float = 1e-9) -> Tensor:
    """The likeliest tokens, each ahead of the next by more than `noise`.

    On a near tie two right ways of computing may choose differently: a comparison of choices says nothing (trap T3).
    Shapes: [..., V] -> [...].
    """
    best = logits.topk(2).values
    lead = (best[..., 0] - best[..., 1]).min().item()
    assert lead > noise, f"the likeliest token leads by {lead:.1e}, noise is {noise:.1e}"
    return logits.argmax(-1)


def traced(model: Model, ids: Tensor, *patterns: str, **options) -> Trace:
    """The intermediates of one run without gradients."""
    trace = Trace(*(patterns or ("*",)))
    with torch.no_grad():
        model(ids, trace=trace, **options)
    return trace


def context(config: Config, length: int, rows: int = 1, documents: Tensor | None = None, **options) -> Sequence:
    """A context for modules that are run alone; its ids do not matter."""
    return Sequence(config, torch.zeros(rows, length, dtype=torch.long), documents, **options)
