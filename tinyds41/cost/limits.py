"""Which contexts a model can have: every cost that depends on one asks here first."""

from __future__ import annotations


def check_context(context: int, max_position_embeddings: int) -> None:
    """Refuses a context that a model of so many positions cannot have.

    Raises: ValueError naming a context that is no whole number, below 1 or over the maximum.
    """
    if not isinstance(context, int) or isinstance(context, bool):
        raise ValueError(f"context={context!r}: a whole number of tokens is needed")
    if context < 1:
        raise ValueError(f"context={context}: a sequence has at least one token")
    if context > max_position_embeddings:
        raise ValueError(f"context={context} exceeds max_position_embeddings={max_position_embeddings}")
