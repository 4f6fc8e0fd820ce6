"""Writing text: one token after the other, each from the logits of the last position."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tinyds41.model.transformer import Model, check_ids
from tinyds41.ops import select_top


def generate(
    model: Model, prompt: str, *, max_new_tokens: int = 100, temperature: float = 1.0, top_k: int | None = None,
    seed: int = 0, stop_ids: tuple[int, ...] = (),
) -> str:  # fmt: skip
    """Continues `prompt` and returns the new text alone; temperature 0 takes the likeliest.

    Differs: every token runs the whole text again; there is no cache in it.
    Raises: ValueError for a model without a tokenizer, an empty prompt, a temperature that is negative or not
        finite, top_k below 1, or more tokens than max_position_embeddings; FloatingPointError for logits that are not
        finite.
    """
    if model.tokenizer is None:
        raise ValueError("this model has no tokenizer: use generate_ids")
    ids = torch.tensor([model.tokenizer.encode(prompt)], dtype=torch.long)
    new = generate_ids(model, ids, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, seed=seed,
                       stop_ids=stop_ids)  # fmt: skip
    return model.tokenizer.decode(new[0].tolist())


@torch.no_grad()
def generate_ids(
    model: Model, ids: Tensor, *, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = None,
    seed: int = 0, stop_ids: tuple[int, ...] = (),
) -> Tensor:  # fmt: skip
    """The same for token ids; a stop id ends the text and is not returned.

    Shapes: [1,S] -> [1,new], on the CPU.
    Raises: ValueError for more than one prompt, ids that do not fit, and as `generate`.
    """
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature={temperature}: 0 or a positive finite number is needed")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens} is negative")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k}: at least one token must be allowed")
    check_ids(ids, model.config)
    if ids.shape[0] != 1:
        raise ValueError(f"one prompt at a time, got {ids.shape[0]}")
    longest = ids.shape[1] + max_new_tokens - 1  # nothing runs on the last token
    if longest > model.config.max_position_embeddings:
        raise ValueError(
            f"{ids.shape[1]} tokens and {max_new_tokens} new ones exceed max_position_embeddings="
            f"{model.config.max_position_embeddings}")  # fmt: skip
    # Ids behind the tokenizer's, where a model has them, stand for no text.
    n_ids = model.config.vocab_size if model.tokenizer is None else model.tokenizer.vocab_size
    generator = torch.Generator().manual_seed(seed)
    text = ids.to(model.device)
    for _ in range(max_new_tokens):
        token = sample(model(text)[0, -1, :n_ids].cpu(), temperature, top_k, generator)
        if token in stop_ids:
            break
        text = torch.cat([text, torch.tensor([[token]], device=text.device)], 1)
    return text[:, ids.shape[1] :].cpu()


def sample(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """One token id of logits [V]; the lowest id wins a tie at temperature 0."""
    logits = logits.double()
    if not logits.isfinite().all():
        raise FloatingPointError("the model gives logits that are not finite: there is no token to choose")
    if temperature == 0:
        return int(select_top(logits, 1))
    if top_k is not None and top_k < logits.shape[0]:
        kept = select_top(logits, top_k)
        logits = torch.full_like(logits, -torch.inf).scatter(0, kept, logits[kept])
    return int(torch.multinomial(((logits - logits.max()) / temperature).softmax(-1), 1, generator=generator))
