"""Text comes from ids that the tokenizer has, and what cannot end well is refused before the first token."""

from __future__ import annotations

import pytest
import torch
from models import NANO, random_ids

from tinyds41.infer.generate import generate, generate_ids, sample
from tinyds41.model.transformer import Model
from tinyds41.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def model() -> Model:
    """Nano with ten times the ids of its tokenizer."""
    tokenizer = Tokenizer.train([], 260)
    config = NANO.replace(vocab_size=2600, engram_compressed_vocab_size=tokenizer.compressed_vocab_size)
    return Model(config, tokenizer=tokenizer)


@pytest.mark.parametrize("temperature", [0, 1.0, 1e-320])
def test_ids_that_the_tokenizer_lacks_are_never_chosen(model, temperature):
    assert isinstance(generate(model, "abc", max_new_tokens=8, temperature=temperature), str)


@pytest.mark.parametrize(("options", "message"), [
    ({"temperature": float("nan")}, "temperature=nan"), ({"temperature": float("inf")}, "temperature=inf"),
    ({"temperature": -1}, "temperature=-1"), ({"top_k": 0}, "top_k=0"), ({"max_new_tokens": -1}, "max_new_tokens=-1"),
    ({"max_new_tokens": 300}, "3 tokens and 300 new ones exceed max_position_embeddings=256"),
])  # fmt: skip
def test_impossible_wishes_are_refused(model, options, message):
    with pytest.raises(ValueError, match=message):
        generate(model, "abc", **{"max_new_tokens": 2, **options})


def test_an_empty_prompt_is_refused(model):
    with pytest.raises(ValueError, match="an empty prompt"):
        generate(model, "")


def test_the_text_may_fill_all_positions():
    """The last token is written, never read."""
    assert generate_ids(Model(NANO), random_ids(1, 254), max_new_tokens=3).shape == (1, 3)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_logits_that_are_not_finite_choose_nothing(temperature):
    with pytest.raises(FloatingPointError, match="not finite"):
        sample(torch.tensor([0.0, torch.nan]), temperature, None, torch.Generator())
