"""What a fresh model computes before its first step (spec 14)."""

import torch

from tinyds41.config import Config
from tinyds41.model.transformer import Model
from tinyds41.trace import Trace


def test_step_0_equals_the_model_without_engram():
    """Exactly: any value at all would flip near ties of experts and cache codes, which change some logits by much."""
    model, ids = Model(Config.preset("nano")), torch.arange(3, 32)[None]
    bare = Model(Config.preset("nano", engram_layer_ids=(), engram_num_embeddings=()))
    shared = {name: tensor for name, tensor in model.state_dict().items() if ".engram." not in name}
    bare.load_state_dict(shared)
    assert torch.equal(model(ids), bare(ids))


def test_engram_learns_from_step_0():
    model = Model(Config.preset("nano"))
    model(torch.arange(3, 32)[None]).logsumexp(-1).sum().backward()
    value = model.get_parameter("layers.1.engram.wkv.weight")
    width = model.config.hidden_size
    assert not value[-width:].any() and value[:-width].all()
    assert value.grad is not None and value.grad[-width:].any()


def test_streams_start_close_to_a_plain_residual():
    trace = Trace("layers.*.hc_*.pre", "layers.*.hc_*.post", "layers.*.hc_*.comb")
    Model(Config.preset("toy", engram_compressed_vocab_size=1024))(torch.arange(3, 67)[None], trace=trace)
    mean = {name: torch.stack([trace[n] for n in trace if n.endswith(name)]).mean((0, 1, 2))
            for name in ("pre", "post", "comb")}  # fmt: skip
    # fn is random, so single tokens scatter around the base: the means are what the base decides.
    torch.testing.assert_close(mean["pre"], torch.full((4,), 0.25), rtol=0, atol=0.1)
    torch.testing.assert_close(mean["post"], torch.ones(4), rtol=0, atol=0.2)
    torch.testing.assert_close(mean["comb"], torch.eye(4), rtol=0, atol=0.15)


def test_initializer_range_widens_matrices_but_not_the_mixing():
    """The same draws, three times as wide: exactly, but for the rounding of one product."""
    narrow, wide = (Model(Config.preset("nano", initializer_range=std)).state_dict() for std in (0.02, 0.06))
    for name in ("layers.2.attn.wq_b.weight", "embed.weight", "layers.3.ffn.experts.w1", "layers.4.indexer.wk.weight"):
        torch.testing.assert_close(wide[name], 3 * narrow[name], rtol=1e-6, atol=0)
    assert torch.equal(wide["layers.2.hc_attn.fn"], narrow["layers.2.hc_attn.fn"])
    assert torch.equal(wide["layers.2.attn_norm.weight"], torch.ones(32))
