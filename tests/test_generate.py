"""Text comes from ids that the tokenizer has, and what cannot end well is refused before the first token."""

from __future__ import annotations

import pytest
import torch
from models import NANO, clear_choice, random_ids, scattered

from tinyds41.infer.generate import generate, generate_ids, padded, stream, tokens
from tinyds41.infer.sample import chances, likeliest, sample
from tinyds41.infer.session import Session
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
    ({"top_p": 0}, "top_p=0"), ({"top_p": 1.1}, "top_p=1.1"), ({"stop": ""}, "an empty text"),
    ({"mode": "half"}, "mode='half'"),
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
    assert [len(row) for row in generate_ids(Model(NANO), random_ids(1, 254), max_new_tokens=3)] == [3]


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_logits_that_are_not_finite_choose_nothing(temperature):
    with pytest.raises(FloatingPointError, match="not finite"):
        sample(torch.tensor([0.0, torch.nan]), temperature, None, torch.Generator())


def greedy(model: Model, ids: list[int], n: int) -> list[int]:
    """The likeliest ids, each from a run of the whole text."""
    text = list(ids)
    with torch.no_grad():
        for _ in range(n):
            n_ids = model.config.vocab_size if model.tokenizer is None else model.tokenizer.vocab_size
            text.append(int(clear_choice(model(torch.tensor([text]))[0, -1, :n_ids], noise=1e-6)))
    return text[len(ids) :]


@pytest.mark.parametrize("mode", ["exact", "full"])
def test_greedy_ids_are_those_of_running_the_whole_text(mode):
    """In float64, where caching changes no argmax."""
    model, ids = scattered(), random_ids(1, 30)
    assert generate_ids(model, ids, max_new_tokens=12, temperature=0, mode=mode) == [greedy(model, ids[0].tolist(), 12)]


def test_a_row_of_a_batch_writes_what_it_writes_alone():
    """Rows of different length, of which the second ends early and leaves."""
    model = scattered()
    prompts = [random_ids(1, n, seed=n)[0].tolist() for n in (9, 17, 4)]
    alone = [generate_ids(model, torch.tensor([row]), max_new_tokens=10, seed=5 + b)[0]
             for b, row in enumerate(prompts)]  # fmt: skip
    stop = alone[1][3]
    expected = [row[: row.index(stop)] if stop in row else row for row in alone]
    assert len(expected[1]) < 10
    ids, mask = padded(prompts)
    assert generate_ids(model, ids, mask=mask, max_new_tokens=10, seed=5, stop_ids=(stop,)) == expected


def test_several_prompts_give_the_texts_of_each(model):
    prompts = ["abc", "a longer one", "x"]
    texts = generate(model, prompts, max_new_tokens=6, seed=3)
    assert texts == [generate(model, text, max_new_tokens=6, seed=3 + b) for b, text in enumerate(prompts)]
    with pytest.raises(ValueError, match="2 prompts for a session"):
        generate(Session(model), ["a", "b"])
    with pytest.raises(ValueError, match=r"an empty prompt: 2 prompts, without tokens are \[1\]"):
        generate(model, ["a", ""])


def test_the_pieces_of_a_stream_are_the_text(model):
    pieces = list(stream(model, "abc", max_new_tokens=40, seed=1))
    assert "".join(pieces) == generate(model, "abc", max_new_tokens=40, seed=1)
    assert len(pieces) > 3
    assert all(pieces)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_stop_text_ends_the_answer_and_is_not_part_of_it(model, length):
    text = generate(model, "abc", max_new_tokens=40, seed=1)
    stop = text[7 : 7 + length]
    expected = text[: text.index(stop)]
    assert generate(model, "abc", max_new_tokens=40, seed=1, stop=stop) == expected
    assert "".join(stream(model, "abc", max_new_tokens=40, seed=1, stop=("never there", stop))) == expected
    assert generate(model, ["abc"], max_new_tokens=40, seed=1, stop=stop) == [expected]


@pytest.mark.parametrize("where", [slice(4, 7), slice(-3, None)], ids=["more text", "the end"])
def test_half_a_stop_text_waits_and_comes_out_when_it_was_none(model, where):
    """What could begin a stop text waits until text behind it, or the end of the answer, shows that it did not."""
    text = generate(model, "abc", max_new_tokens=12, seed=1)
    stop = text[where] + "!?"
    assert generate(model, "abc", max_new_tokens=12, seed=1, stop=stop) == text
    said = ""
    for piece in stream(model, "abc", max_new_tokens=12, seed=1, stop=stop):
        said += piece
        # What could still become the stop text is not let out, before all is known.
        assert said == text or not any(said.endswith(stop[:n]) for n in range(1, len(stop)))
    assert said == text


def test_a_session_goes_on_after_a_stream_was_dropped():
    """It has read the prompt and every piece but the last, and continues like one that read the same."""
    model, ids = scattered(), random_ids(1, 20)
    session, written = Session(model), []
    for (token,) in tokens(session, ids, max_new_tokens=50, temperature=0):
        written.append(token)
        if len(written) == 5:
            break
    assert session.lengths == [24]
    again = Session(model)
    again.prefill(torch.cat([ids, torch.tensor([written[:-1]])], 1), mode="full")
    assert session.fingerprint() == again.fingerprint()
    rest = generate_ids(session, torch.tensor([written[-1:]]), max_new_tokens=4, temperature=0)
    assert rest == [greedy(model, [*ids[0].tolist(), *written], 4)]


@pytest.mark.parametrize(("top_p", "expected"), [
    (0.3, [0, 1, 0, 0]), (0.4, [0, 1, 0, 0]), (0.5, [1, 1, 0, 0]), (0.71, [1, 1, 1, 0]), (1.0, [1, 1, 1, 1]),
])  # fmt: skip
def test_top_p_keeps_the_fewest_likeliest_ids(top_p, expected):
    """Shares .3 .4 .2 .1: an id stays while those before it have less than top_p."""
    share = torch.tensor([0.3, 0.4, 0.2, 0.1], dtype=torch.float64)
    assert likeliest(share, top_p).int().tolist() == expected


def test_of_equal_shares_top_p_keeps_the_lowest_ids():
    assert likeliest(torch.full((5,), 0.2, dtype=torch.float64), 0.35).int().tolist() == [1, 1, 0, 0, 0]


@pytest.mark.parametrize("options", [(0, None, None), (0.7, 5, 0.8), (1.3, None, 0.5)])
def test_chances_of_several_rows_are_those_of_each(options):
    """Bit for bit: what a row draws must not follow from the rows beside it."""
    logits = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    found = chances(logits, *options)
    assert torch.equal(found, torch.stack([torch.stack([chances(row, *options) for row in rows]) for rows in logits]))
    torch.testing.assert_close(found.sum(-1), torch.ones(2, 3, dtype=torch.float64))


def test_samples_follow_the_shares():
    """4,000 draws: a share of .6 has a standard deviation of .008, so five of them are .04."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.log(torch.tensor([0.6, 0.3, 0.1]))
    drawn = torch.bincount(torch.tensor([sample(logits, 1.0, None, generator) for _ in range(4000)]), minlength=3)
    assert (drawn / 4000 - torch.tensor([0.6, 0.3, 0.1])).abs().max() < 0.04
    cut = [sample(logits, 1.0, None, generator, top_p=0.7) for _ in range(300)]
    assert set(cut) == {0, 1}
    assert {sample(logits, 1.0, 1, generator) for _ in range(50)} == {0}
