"""The sampling contract: what lossless speculative sampling means, as pure functions that tests can count.

rows     probability rows and uniforms: one validation, the inverse-CDF draw, normalise(max(p - q, 0))
chain    single-path sampler (Leviathan et al. 2023, Algorithm 1), with or without its bonus token
cascade  the two-proposal cascade of LoopSpec: t1 of q1, t2 of the residual of q2, then the rest
tree     trees of deterministic candidates and their residual verification
readout  the ``LoopedModel`` protocol, and ``Readout``: one depth of it, checked and counted
builder  trees from a draft depth: by fixed widths, or by entropy (``AdaptiveTreePolicy``)
scoring  target rows of a tree: one query a call, one call a depth, or one call in all
decode   whole decoders on those parts: plain, chain, adaptive tree
compare  two decoders, or two imported records, on one target, prompt and number of tokens

Everything is computed in float64 on the CPU. Nothing here is on a server's path; the schedules of ``core`` take their
tokens with stock SGLang's seeded noise, and are measured against this.
"""
