"""What SGLang's own sampler needs on a machine without an accelerator: seeded draws, penalties, deterministic mode.

After every plain forward pass SGLang's ``Sampler`` turns logits into tokens. Three steps on the way do not run here as
they stand, or halt everybody's tokens on their first call; ``HOOKS`` puts twins in their place:

* ``multinomial_with_seed`` is compiled to C++ and hashes with a kernel that the wheel lacks. The twin is
  ``core.noise``, the same hash and float64 formula: the draws of SGLang on a GPU, and of our schedules.
* ``apply_scaling_penalties`` is compiled, too: 11 seconds, or half of one where the platform's compiler is "eager". The
  twin is its arithmetic in plain operations.
* ``maybe_enable_batch_invariant_mode`` replaces an accelerator's products, and fails without one. The twin does
  nothing: a row has the same bits in any batch here (see ``cpu_platform``).

Contract: with these, ``--enable-deterministic-inference`` means here what it means on a GPU. Filters, logprobs, masks
and biases stay SGLang's. Only looped models run on our products and attention; others are refused in that mode.
"""

from __future__ import annotations

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_exec
from torch import Tensor

from sglang_trunc.core.noise import perturbed_argmax


def multinomial_with_seed(logprobs: Tensor, seed: Tensor, positions: Tensor) -> Tensor:
    """One draw a row: int64 ``[n, 1]``, a column of ``logprobs``; the lowest one on ties.

    ``logprobs`` float32 or float64 ``[n, m]``, -inf for a column that must not win. ``seed`` int64 ``[n]``,
    ``positions`` integers ``[n]``. ValueError if the shapes differ. Twin of the function of that name in
    ``srt/layers/sampler.py``.
    """
    return perturbed_argmax(logprobs, seed, positions).unsqueeze(1)


def apply_scaling_penalties(logits: Tensor, scaling_penalties: Tensor) -> None:
    """Repetition penalty in place: negative logits times the factor, the others divided by it.

    ``logits`` floats ``[n, vocabulary]``, ``scaling_penalties`` float32 of that shape, 1 where nothing is to happen.
    Twin of the function of that name in ``srt/sampling/penaltylib/repetition_penalty.py``.
    """
    logits.copy_(torch.where(logits < 0, logits * scaling_penalties, logits / scaling_penalties))


def stay_batch_invariant(_model_runner) -> None:
    """In the place of ``ModelRunner.maybe_enable_batch_invariant_mode``: nothing to do."""


def refuse_deterministic(model: torch.nn.Module) -> None:
    """ValueError for a model that does not run on this platform's row-independent operations, in deterministic mode."""
    if get_exec().deterministic.enable_deterministic_inference:
        raise ValueError(
            "--enable-deterministic-inference needs a looped model (OuroForCausalLM, RavenForCausalLM) on a machine "
            f"without an accelerator; {type(model).__name__} would get other bits in other batches."
        )


_SRT = "sglang.srt."
# SGLang also replaces the names that its modules have imported from these.
HOOKS = (
    (_SRT + "layers.sampler.multinomial_with_seed", multinomial_with_seed, HookType.REPLACE),
    (
        _SRT + "sampling.penaltylib.repetition_penalty.apply_scaling_penalties",
        apply_scaling_penalties,
        HookType.REPLACE,
    ),
    (
        _SRT + "model_executor.model_runner.ModelRunner.maybe_enable_batch_invariant_mode",
        stay_batch_invariant,
        HookType.REPLACE,
    ),
)


def install() -> None:
    """Register the hooks; SGLang applies them after all plugins have run."""
    for target, function, kind in HOOKS:
        HookRegistry.register(target, function, kind)
