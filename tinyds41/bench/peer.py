"""The same weights in mlx-lm: who we are measured against, and how far its logits are from ours."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from tinyds41.checkpoint.names import to_released
from tinyds41.formats import WINDOW, Rows
from tinyds41.infer.session import Session
from tinyds41.model.transformer import Model

PREFILL_STEP = 2048  # tokens that mlx-lm prefills at a time by default


class MlxPeer:
    """mlx-lm's implementation with this model's weights, on the CPU; it has no Engram.

    Raises: ValueError without the packages `mlx-lm` and `mlx[cpu]`, and for a model with Engram.
    """

    name = "mlx-lm"

    def __init__(self, model: Model):
        try:
            # By name: type checkers need not have the packages.
            mx, deepseek_v41 = (import_module(name) for name in ("mlx.core", "mlx_lm.models.deepseek_v41"))
        except ImportError as error:
            raise ValueError(f"the peer mlx-lm needs the packages mlx-lm and mlx[cpu]: {error}") from None

        mx.set_default_device(mx.cpu)
        self.mx, self.model = mx, model
        fields = model.config.to_dict()
        arguments = {**fields.get("text_config", fields), "model_type": "deepseek_v41"}
        self.peer = deepseek_v41.Model(deepseek_v41.ModelArgs.from_dict(arguments))
        weights = {name: mx.array(value.detach().numpy()) for name, value in to_released(model.state_dict()).items()}
        self.peer.load_weights(list(self.peer.sanitize(weights).items()))
        self.cache: Any = self.peer.make_cache()

    def prefill(self, ids: Tensor) -> Tensor:
        """Reads ids [1,S] into a new cache. Shapes: -> logits [V] of the last token."""
        self.cache = self.peer.make_cache()
        logits = None
        for part in ids.split(PREFILL_STEP, 1):
            logits = self._run(part)
        assert logits is not None
        return logits

    def decode(self, token: int) -> Tensor:
        """Shapes: -> logits [V]."""
        return self._run(torch.tensor([[token]]))

    def copy_cache(self, session: Session) -> None:
        """Takes over what a session of one text holds, decoded: a long context without the peer's prefill."""
        self.cache = self.peer.make_cache()
        cache = session.cache
        (length,) = cache.lengths
        for layer, (mine, window) in enumerate(zip(self.cache, cache.windows, strict=True)):
            mine.offset = length
            rows = window.latest(0, self.model.config.sliding_window).unsqueeze(0)
            form = WINDOW if self.model.config.quantize_cache else None
            mine.window = self._array(Rows(rows, form, self.model.config.head_dim, cache.dtype).all()[0])
            if layer in cache.sources:
                source, ratio = cache.sources[layer], cache.plan[layer].ratio
                mine.compress_kv = self._array(source.kv.rows().all()[0])
                mine.index_k = self._array(source.keys.rows().all()[0])
                if source.pending and length % ratio:
                    mine.pending_kv, mine.pending_gate = (
                        self._array(recent.latest(0, length % ratio)) for recent in source.pending)  # fmt: skip

    def _array(self, rows: Tensor) -> Any:
        return self.mx.array(rows.unsqueeze(0).numpy())

    def _run(self, ids: Tensor) -> Tensor:
        logits = self.peer(self.mx.array(ids.numpy()), self.cache)[0, -1]
        self.mx.eval(logits)
        return torch.tensor(logits.tolist())
