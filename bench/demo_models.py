"""Shapes, initialisation and losses of the two demo models.

Both are 128 wide with two heads of 64, so that 128 -> 512 or 2048 is a power of four and widening is exact
(see widen.py). The Raven demo uses the retrofitted-Llama block: it is the one kind whose blocks can be the
identity, which lets widen.py add layers.

Ouro is trained on the mean cross-entropy of all its depths, as published. Raven draws a depth for every
batch and back-propagates through the last recurrences only, as published. Early depths therefore predict
well on their own, which is what drafting from them needs.
"""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import torch
from torch.nn import functional as F

from sglang_trunc.core.initial_state import initial_state
from sglang_trunc.reference.configs import OuroReferenceConfig, RavenReferenceConfig
from sglang_trunc.reference.looped import LoopedReference
from sglang_trunc.reference.ouro import OuroReference
from sglang_trunc.reference.raven import RavenReference

VOCAB_SIZE = 2048
MAX_POSITIONS = 2048
STOPS = (0, 2)

OURO = OuroReferenceConfig(
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=VOCAB_SIZE,
    full_depth=4,
    max_position_embeddings=MAX_POSITIONS,
    eos_token_id=STOPS,
)
RAVEN = RavenReferenceConfig(
    block="llama",
    n_embd=128,
    n_heads=2,
    num_key_value_heads=2,
    prelude_layers=1,
    core_layers=2,
    coda_layers=1,
    intermediate_size=384,
    vocab_size=VOCAB_SIZE,
    full_depth=16,
    norm_eps=1e-6,
    rope_theta=5e5,
    max_position_embeddings=MAX_POSITIONS,
    eos_token_id=STOPS,
)
BACKPROP_DEPTH = 4  # recurrences that gradients flow through, Raven
EMBEDDING_STD = 0.5
BRANCH_SCALE = 0.4  # Ouro's branch output norms: twelve unit branches would drown the embedding
MEAN_DEPTH = 5.0  # of the depths drawn in training, Raven


class Losses(NamedTuple):
    total: torch.Tensor
    depths: tuple[int, ...]
    values: tuple[float, ...]  # cross-entropy in nats per token, one per depth


def build(family: str, seed: int) -> LoopedReference:
    torch.manual_seed(seed)
    model: LoopedReference = OuroReference(OURO) if family == "ouro" else RavenReference(RAVEN)
    _initialise(model, torch.Generator().manual_seed(seed))
    return model


@torch.no_grad()
def _initialise(model: LoopedReference, generator: torch.Generator) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            if "layernorm_2." in name:
                parameter.fill_(BRANCH_SCALE)
            continue  # other norm weights stay 1, the exit gate's bias is unused
        fan_in = parameter.shape[1]
        std = EMBEDDING_STD if name.endswith(("embed_tokens.weight", "wte.weight")) else 1 / math.sqrt(fan_in)
        if name == "lm_head.weight":
            std = 0.02
        elif name.endswith((".proj.weight", "o_proj.weight", "down_proj.weight")):
            std *= 0.3
        parameter.normal_(0.0, std, generator=generator)


def losses(model: LoopedReference, tokens: torch.Tensor, rng: random.Random, step: int) -> Losses:
    ids, targets = tokens[:, :-1], tokens[:, 1:].flatten()
    if isinstance(model, RavenReference):
        return _raven_loss(model, ids, targets, rng, step)
    context, state = model.begin(ids)
    per_depth = []
    for _ in range(model.full_depth):
        state = model.advance(context, state)
        per_depth.append(_cross_entropy(model.readout(context, state), targets))
    depths = tuple(range(1, model.full_depth + 1))
    return Losses(torch.stack(per_depth).mean(), depths, tuple(float(x.detach()) for x in per_depth))


def _raven_loss(
    model: RavenReference, ids: torch.Tensor, targets: torch.Tensor, rng: random.Random, step: int
) -> Losses:
    depth = draw_depth(rng, model.full_depth)
    # another seed every step: the model must not learn one particular noise
    noise = initial_state(torch.arange(ids.shape[1]), step, model.width, model.config.state_std, torch.float32)
    context, state = model.begin(ids, noise[None].expand(ids.shape[0], -1, -1))
    with torch.no_grad():
        for _ in range(depth - BACKPROP_DEPTH):
            state = model.advance(context, state)
    for _ in range(min(depth, BACKPROP_DEPTH)):
        state = model.advance(context, state)
    loss = _cross_entropy(model.readout(context, state), targets)
    return Losses(loss, (depth,), (float(loss.detach()),))


def draw_depth(rng: random.Random, full_depth: int) -> int:
    """Log-normal Poisson filling as in the Huginn report, shifted to start at 1 and cut at R."""
    rate = math.exp(rng.gauss(math.log(MEAN_DEPTH - 1) - 0.125, 0.5))
    count, product, limit = 0, rng.random(), math.exp(-rate)
    while product > limit:
        count, product = count + 1, product * rng.random()
    return min(1 + count, full_depth)


def _cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets)
