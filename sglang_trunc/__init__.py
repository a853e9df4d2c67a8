"""Lossless self-speculative decoding of looped transformers on stock SGLang.

core       policies, acceptance, options, counters, near-tie rule: torch and the standard library only
kernels    raw tensors in and out, each beside its torch reference: torch and triton only
reference  plain-torch, cache-less models and greedy decoding: the truth that every test compares with
models     Ouro and Raven as SGLang models: prelude, core step, readout; config classes; weight checks
engine     the SGLang adapter: worker, KV pool, lane attention, admission, registration
platform   the GPU-less platform: attention, packed linear layers, thread settings
cli        the ``sglang-trunc`` command
plugin     SGLang's two entry points; ``seams`` is the table of every SGLang name relied on
"""

__version__ = "0.1.0"
