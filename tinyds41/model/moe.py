"""Mixture of experts: every token visits A of E experts and the shared one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinyds41 import few_tokens
from tinyds41.config import Config
from tinyds41.few_tokens import are_few
from tinyds41.mixing import at_least_fp32
from tinyds41.model.context import Context
from tinyds41.model.linear import Linear
from tinyds41.model.width import check_width
from tinyds41.ops import Ops, select_top, swiglu
from tinyds41.trace import see


class Gate(nn.Module):
    """s = sqrt(softplus(x W_g / gate_temp)); choose by s + bias, weigh by s alone.

    Source: spec 8.
    """

    def __init__(self, config: Config):
        super().__init__()
        self.temperature, self.n_active = config.gate_temp, config.num_experts_per_tok
        self.scaling = config.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        # Moved by the balance rule, never by a gradient; bias_vl is the released files' second one, for images.
        self.bias = nn.Parameter(torch.zeros(config.n_routed_experts), requires_grad=False)
        self.bias_vl = nn.Parameter(torch.zeros(config.n_routed_experts), requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Shapes: x [B,S,D] -> scores [B,S,E], experts [B,S,A] (ascending), weights [B,S,A]."""
        check_width(x, self.weight.shape[1], "Gate")
        if are_few(x.shape[:2].numel(), x):
            logits_BSE = F.linear(x, self.weight) / self.temperature
            return few_tokens.gate(logits_BSE, self.bias, self.n_active, self.scaling)
        logits_BSE = F.linear(at_least_fp32(x), at_least_fp32(self.weight)) / self.temperature
        scores_BSE = F.softplus(logits_BSE).sqrt()
        # Choose with the bias, weigh without it: a pushed expert must not shout louder.
        experts_BSA = select_top((scores_BSE + at_least_fp32(self.bias)).detach(), self.n_active)
        chosen_BSA = scores_BSE.gather(-1, experts_BSA)
        return scores_BSE, experts_BSA, self.scaling * chosen_BSA / (chosen_BSA.sum(-1, keepdim=True) + 1e-20)


class Expert(nn.Module):
    """One clamped SwiGLU expert. Shapes: [..., D] -> [..., D]. Source: spec 2."""

    def __init__(self, config: Config):
        super().__init__()
        self.limit = config.swiglu_limit
        self.w1 = Linear(config.hidden_size, config.moe_intermediate_size)
        self.w2 = Linear(config.moe_intermediate_size, config.hidden_size)
        self.w3 = Linear(config.hidden_size, config.moe_intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        check_width(x, self.w1.in_features, "Expert")
        return swiglu(x, self.w1.weight, self.w2.weight, self.w3.weight, self.limit)


class Experts(nn.Module):
    """The routed experts as three stacked parameters. Shapes: w1, w3 [E,F,D], w2 [E,D,F]."""

    def __init__(self, config: Config):
        super().__init__()
        n, width, inner = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.w1 = nn.Parameter(torch.empty(n, inner, width))
        self.w2 = nn.Parameter(torch.empty(n, width, inner))
        self.w3 = nn.Parameter(torch.empty(n, inner, width))


class MoE(nn.Module):
    """sum over chosen experts of weight * expert(x), plus the shared expert, in at least fp32.

    Source: spec 8.
    """

    def __init__(self, config: Config, layer: int, ops: Ops, place: str = "layers"):
        super().__init__()
        self.ops, self.limit = ops, config.swiglu_limit
        self.path = f"{place}.{layer}.ffn"
        self.gate = Gate(config)
        self.experts = Experts(config)
        self.shared_experts = Expert(config)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Shapes: [B,S,D] -> [B,S,D]."""
        scores_BSE, experts_BSA, weights_BSA = self.gate(x)
        routed_nD = self.ops.experts(
            x.flatten(0, 1), experts_BSA.flatten(0, 1), weights_BSA.flatten(0, 1),
            self.experts.w1, self.experts.w2, self.experts.w3, self.limit,
        )  # fmt: skip
        see(ctx.trace, f"{self.path}.input", x)
        see(ctx.trace, f"{self.path}.scores", scores_BSE)
        see(ctx.trace, f"{self.path}.experts", experts_BSA)
        see(ctx.trace, f"{self.path}.weights", weights_BSA)
        return (routed_nD.view(x.shape) + self.shared_experts(x)).to(x.dtype)
