"""Lookup: drafts copied from text that is already there, the request's own or a shared corpus.

context_tree  where the contexts before the text's positions occurred earlier: a tree in flat integer arrays
candidates    what a lookup finds: ``Candidate``, its order, and what counts as the same
index         ``LookupIndex``: one request's prompt and committed output, bounded by generations
corpus        ``Corpus``: documents for all requests, from a JSON Lines file
merge         ``DraftTree``: several candidates as one small tree, most promising nodes first

Host integers only, standard library only, no clock and no set order: the same calls give the same candidates on every
rank. Nothing here decides what is committed, a wrong candidate costs time alone. ``engine.lookahead`` keeps an index
for every request; ``core.lookahead`` and ``core.trunc`` start what it finds.

Source: prompt lookup decoding (Saxena 2023) with the exact longest match in place of a fixed n-gram.
"""
