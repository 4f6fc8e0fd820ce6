"""How many of a prompt's tokens the decoder runs on."""

from __future__ import annotations

from tinyds41.config import Config

MODES = ("exact", "bounded", "full")


def decoder_tokens(config: Config, mode: str) -> int | None:
    """On how many of a prompt's last tokens the decoder runs; None for all of them.

    exact: W + (n_dec - 1)(W - 1), as far back as decoder windows reach through the layers, W - 1 tokens each, so later
        tokens see what they would see after `full`. bounded: W, with windows that begin there: an approximation, the
        choice of the released system. full: all.

    Raises: ValueError for another mode. Source: spec 5.
    """
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} is none of {', '.join(MODES)}")
    plan, window = config.plan(), config.sliding_window
    if mode == "full" or plan.boundary is None:
        return None
    return window if mode == "bounded" else window + (plan.n_decoder - 1) * (window - 1)
