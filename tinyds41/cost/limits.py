"""Which contexts a model can have: every cost that depends on one asks here first."""

from __future__ import annotations

from tinyds41.config import Config


def check_context(config: Config, context: int) -> None:
    """Refuses a context that the model cannot have.

    Raises: ValueError naming a context that is no whole number, below 1 or over max_position_embeddings.
    """
    if not isinstance(context, int) or isinstance(context, bool):
        raise ValueError(f"context={context!r}: a whole number of tokens is needed")
    if context < 1:
        raise ValueError(f"context={context}: a sequence has at least one token")
    if context > config.max_position_embeddings:
        raise ValueError(f"context={context} exceeds max_position_embeddings={config.max_position_embeddings}")
