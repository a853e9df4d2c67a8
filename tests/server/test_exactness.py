"""float32: every family, plain and speculative, gives the reference model's tokens whatever the server's settings.

``BLOCKS`` and ``PIPELINES`` cover the dimensions: over a family's rows every value of page size, chunked prefill,
prefix cache and overlap occurs, and over the speculative rows draft depths from 1 to R and block sizes from 1 to 8 do,
trees of one lane and of 32, cut by their estimates and full. Half of the rows are slow tests. (All depths run in
``tests/engine``, without a server; other pairs of the pipelines in ``test_finish``, ``test_small_pool`` and
``test_bit_equality``.)
"""

from __future__ import annotations

import pytest

from sglang_trunc.serving.counters import STATE_KEY, counted_since, engine_counters, speculation
from tests.server.oracle import LENGTHS, prompt_of
from tests.server.setups import LoopSpec, Setup, Trunc, slow

R = {"ouro": 4, "ouro-gqa": 4, "huginn": 8, "retro-llama": 8, "retro-olmo2": 4}
OLMO = {"full_depth": R["retro-olmo2"]}

BLOCKS = (
    #                   d1, block, threshold  page      chunk     radix        overlap
    Setup("ouro", None, page=1, chunk=7),
    Setup("ouro", Trunc(1, 4), page=16, chunk=-1, radix=False),
    slow(Setup("ouro", Trunc(4, 7), page=1, chunk=7, overlap=False)),
    slow(Setup("ouro", Trunc(1, 3), page=16, chunk=16, override={"total_ut_steps": 2})),
    slow(Setup("ouro-gqa", None, page=16, chunk=16, radix=False, overlap=False)),
    Setup("ouro-gqa", Trunc(2, 5), page=1, chunk=-1),
    Setup("huginn", None, page=1, chunk=-1, radix=False),
    Setup("huginn", Trunc(3, 6, 0.025), page=16, chunk=16, overlap=False),
    slow(Setup("retro-llama", None, page=16, chunk=-1, overlap=False)),
    Setup("retro-llama", Trunc(8, 2), page=1, chunk=7, radix=False),
    slow(Setup("retro-llama", Trunc(5, 1), page=16, chunk=16)),
    slow(Setup("retro-olmo2", None, page=16, chunk=16, radix=False, checkpoint=OLMO)),
    Setup("retro-olmo2", Trunc(2, 8, 0.018), page=1, chunk=-1, overlap=False, checkpoint=OLMO),
)
# Early depths of an Ouro with 16 steps agree with the last one only where the steps are small.
OURO_16 = {"checkpoint": {"dial": 0.03}, "override": {"total_ut_steps": 16}}
RAVEN_16 = {"checkpoint": {"full_depth": 16}}
PIPELINES = (
    #                   d1, d2, width, survival    page      chunk     radix        overlap
    Setup("ouro", LoopSpec(1, None, 8, 0.0), page=1, chunk=7),
    slow(Setup("ouro", LoopSpec(2, 14, 8), page=16, chunk=-1, overlap=False, **OURO_16)),
    slow(Setup("ouro-gqa", LoopSpec(8, None, 1), page=1, chunk=16, **OURO_16)),
    Setup("ouro-gqa", LoopSpec(4, 12, 32, 0.0), page=16, chunk=-1, radix=False, **OURO_16),
    Setup("huginn", LoopSpec(2, None, 32, 0.0), page=16, chunk=16, **RAVEN_16),
    slow(Setup("huginn", LoopSpec(1, 2, 8, 0.0), page=1, chunk=7, overlap=False, **RAVEN_16)),
    slow(Setup("retro-llama", LoopSpec(4, None, 2), page=1, chunk=-1, radix=False, **RAVEN_16)),
    Setup("retro-llama", LoopSpec(1, 8, 32), page=1, chunk=16, **RAVEN_16),
    slow(Setup("retro-llama", LoopSpec(2, 4, 32), page=16, chunk=-1, **RAVEN_16)),
    slow(Setup("retro-olmo2", LoopSpec(1, None, 8, 0.0), page=1, chunk=7, overlap=False, **RAVEN_16)),
    Setup("retro-olmo2", LoopSpec(2, 8, 32, 0.0), page=16, chunk=16, radix=False, **RAVEN_16),
)
ROWS = (*BLOCKS, *PIPELINES)
pytestmark = pytest.mark.parametrize("served", ROWS, ids=lambda row: row.name, indirect=True)


def recurrences(setup: Setup) -> int:
    return setup.override.get("total_ut_steps", setup.checkpoint.get("full_depth", R[setup.family]))


def tokens(setup: Setup) -> int:
    return 200 if recurrences(setup) < 16 else 64


def whole_pages(length: int, page: int) -> int:
    return length // page * page


def test_prompts_of_nine_lengths_side_by_side(client, served, oracle):
    prompts = [prompt_of(length) for length in LENGTHS]
    answers = client.generate_many(prompts, 8, max_new_tokens=tokens(served), ignore_eos=True)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer.output_ids) == tokens(served)
        assert oracle.mismatch(prompt, answer.output_ids) is None, f"prompt of {len(prompt)} tokens"


def test_one_request_at_a_time(client, served, oracle):
    for length in (2, 64):
        prompt = prompt_of(length, seed=1)
        answer = client.generate(prompt, max_new_tokens=tokens(served), ignore_eos=True)
        assert oracle.mismatch(prompt, answer.output_ids) is None, f"prompt of {length} tokens"


def test_same_prompt_again_reuses_its_prefix_and_gives_the_same(client, served, oracle):
    prompt = prompt_of(250, seed=2)
    client.flush_cache()
    most = min(60, tokens(served) // 2)
    first, again = (client.generate(prompt, max_new_tokens=most, ignore_eos=True) for _ in range(2))
    assert oracle.mismatch(prompt, first.output_ids) is None
    assert again.output_ids == first.output_ids
    # At least one token is always computed, to have logits.
    assert [first.cached_tokens, again.cached_tokens] == [
        0,
        whole_pages(len(prompt) - 1, served.page) if served.radix else 0,
    ]
    if isinstance(served.schedule, Trunc):  # what is drafted and accepted does not depend on where the prefix came from
        assert speculation(again.meta_info) == speculation(first.meta_info)


def test_next_turn_reuses_prompt_and_answer(client, served, oracle):
    prompt = prompt_of(40, seed=3)
    most = min(50, tokens(served) // 2)
    answer = client.generate(prompt, max_new_tokens=most, ignore_eos=True)
    turn = [*prompt, *answer.output_ids, *prompt_of(9, seed=3)]
    follow_up = client.generate(turn, max_new_tokens=most, ignore_eos=True)
    assert oracle.mismatch(turn, follow_up.output_ids) is None
    # Plain decoding leaves the answer's last token without KV; a run may have gone past it.
    known = len(prompt) + len(answer.output_ids)
    reusable = [whole_pages(length, served.page) if served.radix else 0 for length in (known - 1, known)]
    assert reusable[0] <= follow_up.cached_tokens <= reusable[1]


def test_counters_add_up(server, served, client):
    before = server.internal_state()
    if served.schedule is None:
        assert STATE_KEY not in before
        return
    answers = client.generate_many([prompt_of(n, seed=4) for n in (5, 20, 30)], 3, max_new_tokens=41, ignore_eos=True)
    after = server.internal_state()
    if isinstance(served.schedule, Trunc):
        check_blocks(served, answers, engine_counters(after) - engine_counters(before))
    else:
        check_pipeline(served, answers, counted_since(before, after))


def check_blocks(served, answers, spent) -> None:
    assert spent.tokens == spent.runs + spent.accepted
    # Runs may go past the last wanted token, by less than a block; the first token is the prefill's.
    wanted = sum(answer.completion_tokens - 1 for answer in answers)
    assert wanted <= spent.tokens
    if not served.overlap:
        assert spent.tokens < wanted + len(answers) * served.schedule.block_size
    if served.schedule.block_size == 1:
        assert spent.drafted == spent.accepted == 0
    elif served.schedule.d1 == recurrences(served):
        assert spent.drafted == spent.accepted > 0
    else:
        assert spent.drafted > spent.accepted > 0


def check_pipeline(served, answers, spent) -> None:
    """The server is idle before and after: no lane is in flight."""
    plan, full = served.schedule, recurrences(served)
    widths = {int(width): ticks for width, ticks in spent["ticks_by_width"].items() if ticks}
    proposing = {str(plan.d1), str(plan.d2)} - {"None"}
    # Nothing is run past the last wanted token, and the first one is the prefill's.
    assert spent["tokens"] == sum(answer.completion_tokens - 1 for answer in answers)
    assert spent["tokens"] == spent["accepted"] + spent["restarts"] + spent["ended"]
    assert spent["rows"] + spent["warm_rows"] == full * spent["tokens"] + spent["rows_wasted"]
    assert spent["cold_starts"] + spent["restarts"] + spent["drafted"] == spent["tokens"] + spent["lanes_dropped"]
    assert spent["cold_starts"] + spent["warm_starts"] == spent["ended"] == len(answers)
    assert max(widths) <= plan.max_width + len(answers)  # trees and arrivals
    assert spent["missed"] <= spent["restarts"]
    assert spent["rows"] == sum(width * ticks for width, ticks in widths.items())
    assert spent["ticks"] == sum(widths.values())
    assert spent["readouts_by_depth"][str(full)] == spent["tokens"]
    assert spent["proposed_by_depth"].keys() <= proposing
    for name in ("drafted", "accepted"):
        assert sum(spent[f"{name}_by_depth"].values()) == spent[name]
    for depth, accepted in spent["accepted_by_depth"].items():
        assert accepted <= spent["drafted_by_depth"][depth] <= spent["proposed_by_depth"][depth]
    if plan.max_width == 1:
        assert spent["drafted"] == 0
    elif plan.max_width > len(answers):
        assert spent["drafted"] > spent["accepted"] > 0
