"""Examples for what a registered algorithm can say to SGLang: contract, verify input, options, refusals, counters."""

from __future__ import annotations

import argparse
import inspect
import pkgutil
import types
from typing import Any

import torch
from sglang.srt.arg_groups.speculative_hook import handle_speculative_decoding
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.internal_state import SchedulerInternalStateController
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative import spec_info, spec_registry
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from tests.patches import patched_tree
from tests.patches.run_examples import replaced


def registered(name: str, spec_class: type = CustomSpecAlgo, **options: Any):
    """An algorithm of a plugin, as SGLang looks it up."""
    spec_registry._REGISTRY.pop(name, None)  # every side registers it anew
    SpeculativeAlgorithm.register(name, spec_class=spec_class, **options)(lambda server_args: object)
    return SpeculativeAlgorithm.from_string(name)


# --- custom-spec-algo-contract ---


def contract(side: str) -> dict[str, Any]:
    """The four methods that the scheduler calls and ``CustomSpecAlgo`` lacks."""
    spec_class = CustomSpecAlgo
    if side == "ours":
        from sglang_trunc.engine.algorithm import LoopedAlgorithm as spec_class
    algorithm = registered("EXAMPLE", spec_class)
    pool = types.SimpleNamespace(req_to_token=torch.zeros(5, 8, dtype=torch.int32))
    return {
        "carries_draft_hidden_states": algorithm.carries_draft_hidden_states(),
        "need_topk": algorithm.need_topk(),
        "get_platform_worker_cls": algorithm.get_platform_worker_cls(),
        "relay rows": len(algorithm.create_future_map(torch.device("cpu"), pool).output_tokens_buf),
    }


class LikeEagle(CustomSpecAlgo):
    def is_eagle(self) -> bool:
        return True


def joined_family(side: str) -> list[bool]:
    """A subclass that joins a built-in family gets that family's relay."""
    algorithm = registered("EXAMPLE", LikeEagle)
    return [algorithm.need_topk(), algorithm.carries_draft_hidden_states()]


def contract_guard(side: str) -> str:
    """A method that the enum gets one day and ``CustomSpecAlgo`` does not."""
    SpeculativeAlgorithm.brand_new = lambda self: None
    try:
        registered("EXAMPLE")
    finally:
        del SpeculativeAlgorithm.brand_new
    return "registered"


# --- custom-spec-verify-input ---


class Verifying(CustomSpecAlgo):
    def create_verify_input(self, *, custom_mask, num_tokens_per_req: int, is_draft_worker: bool):
        return verify_input(custom_mask, num_tokens_per_req)


class VerifyingLikeEagle(LikeEagle):
    def create_verify_input(self, *, custom_mask, num_tokens_per_req: int, is_draft_worker: bool):
        return verify_input(custom_mask, num_tokens_per_req)


def verify_input(custom_mask: torch.Tensor, width: int) -> NgramVerifyInput:
    return NgramVerifyInput(
        draft_token=None,
        custom_mask=custom_mask,
        positions=None,
        retrieve_index=None,
        retrieve_next_token=None,
        retrieve_next_sibling=None,
        draft_token_num=width,
    )


def verify_inputs(side: str) -> dict[str, list[Any]]:
    """Per algorithm: what the graph capture and the warm-up get, as (class, width)."""
    algorithms = {
        "own input": registered("EXAMPLE", Verifying),
        "no input": registered("PLAIN_EXAMPLE"),
        "eagle's": registered("EAGLE_EXAMPLE", LikeEagle),
        "own before eagle's": registered("OTHER_EXAMPLE", VerifyingLikeEagle),
        "built in": SpeculativeAlgorithm.NGRAM,
    }
    config = types.SimpleNamespace(
        speculative_num_steps=3, speculative_eagle_topk=1, speculative_num_draft_tokens=4, speculative_algorithm="X"
    )
    answers = {}
    for name, algorithm in algorithms.items():
        model_config = types.SimpleNamespace(hidden_size=2)
        runner = types.SimpleNamespace(
            model_runner=types.SimpleNamespace(
                spec_algorithm=algorithm,
                is_draft_worker=False,
                model_config=model_config,
                dtype=torch.float32,
                device="cpu",
            ),
            buffers=types.SimpleNamespace(custom_mask=torch.ones(1, dtype=torch.bool)),
            captured_req_width=4,
            speculative_num_steps=3,
            speculative_num_draft_tokens=4,
        )
        from sglang.srt.model_executor.runner import decode_cuda_graph_runner

        with (
            replaced(spec_info, get_spec_config=lambda: config),
            replaced(decode_cuda_graph_runner, get_spec=lambda: config),
        ):
            captured = DecodeCudaGraphRunner.get_spec_info(runner, 8)
            warm = spec_info.create_dummy_verify_input(algorithm, runner.buffers.custom_mask, 4, False)
        answers[name] = [one and [type(one).__name__, one.draft_token_num] for one in (captured, warm)]
    return answers


# --- speculative-plugin-config ---


def plugin_config(side: str) -> Any:
    """From the command line to the algorithm's own check."""
    if side == "ours":
        from sglang_trunc.core.presets import ModelShape
        from sglang_trunc.core.resolve import resolve_options

        shape = ModelShape("OuroForCausalLM", 64, 4, 4, 256, 2)
        by_variable = resolve_options("TRUNC", shape, environ={"SGLANG_TRUNC_D1": "2"})
        by_override = resolve_options("TRUNC", shape, {"d1": 2}, environ={})
        return [by_variable.options.d1, by_override.options.d1]
    seen = []
    registered("EXAMPLE", validate_server_args=lambda args: seen.append(args.speculative_plugin_config))
    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    given, unknown = parser.parse_known_args(
        ["--model-path", "m", "--speculative-algorithm", "example", "--speculative-plugin-config", '{"depth": 2}']
    )
    if unknown:
        return f"unknown: {unknown[0]}"
    args = ServerArgs.from_cli_args(given)
    handle_speculative_decoding(args)
    return {"seen": seen, "namespace": ServerArgs._NS_BY_FIELD["speculative_plugin_config"]}


def plugin_config_refused(side: str) -> list[str]:
    """Where nobody would read it."""
    sentences = []
    registered("EXAMPLE")
    for algorithm, config in ((None, {"depth": 2}), ("NGRAM", {"depth": 2}), ("EXAMPLE", [1])):
        args = ServerArgs(model_path="m", speculative_algorithm=algorithm, speculative_plugin_config=config)
        try:
            handle_speculative_decoding(args)
        except ValueError as error:
            sentences.append(str(error))
    return sentences


# --- custom-spec-validate-request ---


class Refusing(CustomSpecAlgo):
    def validate_request(self, req) -> str | None:
        return "no LoRA" if req.lora_id else None


def refusal(side: str) -> Any:
    """(a request that cannot be served, one that can)."""
    refused, served = types.SimpleNamespace(lora_id="a"), types.SimpleNamespace(lora_id=None)
    for req in (refused, served):
        req.custom_logit_processor = None
    if side == "ours":
        from sglang_trunc.engine.admission import refusal as ours

        return [bool(ours(refused)), ours(served)]
    scheduler = types.SimpleNamespace(spec_algorithm=registered("EXAMPLE", Refusing), enable_overlap=False)
    sentence = Scheduler._validate_spec_request(scheduler, refused)
    assert "_validate_spec_request" in inspect.getsource(Scheduler._handle_generate_request)
    return [bool(sentence), Scheduler._validate_spec_request(scheduler, served)]


def builtin_refusal(side: str) -> str:
    """The built-in families' checks stand behind the same call."""
    from sglang.srt.managers import scheduler as module

    with replaced(module, validate_uno_request=lambda req: "not by UNO"):
        scheduler = types.SimpleNamespace(spec_algorithm=SpeculativeAlgorithm.UNO, enable_overlap=False)
        return Scheduler._validate_spec_request(scheduler, None)


# --- spec-worker-internal-state ---


class Counting(BaseSpecWorker):
    def __init__(self):
        """Nothing of a real worker's."""

    def get_internal_state(self) -> dict[str, Any]:
        return {"sglang_trunc": {"drafts": 3}}


def internal_state(side: str) -> Any:
    """What /server_info says of a worker's own counters."""
    scheduler = types.SimpleNamespace(spec_algorithm=registered("EXAMPLE"), draft_worker=Counting())
    controller = SchedulerInternalStateController(scheduler, record_step_time=False)
    controller._average_accept_length = lambda: None
    state: dict[str, Any] = {}
    controller._add_speculative(state)
    if side == "ours":
        from sglang_trunc.engine import reporting

        worker = types.SimpleNamespace(
            options=options_of_ours(),
            model=types.SimpleNamespace(shape=types.SimpleNamespace(recurrences=4)),
            counters=types.SimpleNamespace(report=lambda: {"drafts": 3}),
            cost=None,
            stopwatch=None,
        )
        with replaced(reporting, is_ours=lambda algorithm: True):
            scheduler.draft_worker = worker
            reporting.add_counters(None, controller, state)
        return {"sglang_trunc": state["sglang_trunc"]["counters"]}
    return state


def options_of_ours():
    from sglang_trunc.core.options import TruncOptions

    return TruncOptions(d1=1, block_size=4, draft_threshold=0.0)


# --- the inventory ---


def stand_ins(side: str) -> dict[str, Any]:
    """What the notes name: whether it is there, and the hooks that are."""
    from sglang_trunc.engine.install import HOOKS

    hooks = [target.removeprefix("sglang.srt.") for target, _, _ in HOOKS]
    named = [name for row in patched_tree.inventory() for name in row.stand_ins]
    return {"hooks": hooks, "missing": [name for name in named if not stands_in(name, hooks)]}


def stands_in(name: str, hooks: list[str]) -> bool:
    kind, path = name.split(" ")
    if kind == "hook":
        return path in hooks
    if kind == "function":
        return callable(pkgutil.resolve_name("sglang_trunc." + path))
    owner, _, method = path.rpartition(".")
    cls = pkgutil.resolve_name("sglang_trunc." + owner)
    return method in vars(cls) and cls.__mro__[1].__module__.startswith("sglang.")


EXAMPLES = {
    "stand-ins": stand_ins,
    "contract": contract,
    "joined family": joined_family,
    "contract guard": contract_guard,
    "verify inputs": verify_inputs,
    "plugin config": plugin_config,
    "plugin config refused": plugin_config_refused,
    "refusal": refusal,
    "builtin refusal": builtin_refusal,
    "internal state": internal_state,
}
