"""What the algorithms refuse at launch, in which words, and what they fill in."""

from __future__ import annotations

import inspect
import json
import re
import types

import pytest
from sglang.srt.model_executor.cuda_graph_config import Backend, CudaGraphConfig
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from sglang_trunc.core.options import OPTIONS, OptionError, env_name, names_of
from sglang_trunc.engine.algorithm import _REFUSED, LoopedAlgorithm, validate
from sglang_trunc.engine.names import ALGORITHMS, COST_ENV
from sglang_trunc.engine.options import OTHER_ENVIRONMENT
from sglang_trunc.platform.names import ATTENTION_BACKEND

pytestmark = pytest.mark.usefixtures("sglang_context", "no_options")
every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)
BLOCK = {"BLOCK_SIZE": "4"}


@pytest.fixture
def no_options(monkeypatch):
    for name in {name for algorithm in OPTIONS for name in names_of(algorithm)}:
        monkeypatch.delenv(env_name(name), raising=False)


@pytest.fixture
def args(tiny_checkpoint):
    """``ServerArgs`` with every checked field at its first accepted value."""

    def make(family: str = "ouro", override: dict | str | None = None, **fields) -> types.SimpleNamespace:
        if isinstance(override, dict):
            override = json.dumps(override)
        accepted = {field: values[0] for field, values, _ in _REFUSED}
        return types.SimpleNamespace(
            **{
                **accepted,
                "speculative_algorithm": "TRUNC",
                "model_path": str(tiny_checkpoint(family)),
                "trust_remote_code": False,
                "revision": None,
                "json_model_override_args": override or "{}",
                "attention_backend": ATTENTION_BACKEND,
                "prefill_attention_backend": None,
                "decode_attention_backend": None,
                "enable_mixed_chunk": True,
                "cuda_graph_config": None,
                **fields,
            }
        )

    return make


@pytest.mark.parametrize(
    ("algorithm", "options", "tokens"),
    [
        ("TRUNC", {"block_size": 6}, 6),
        ("LOOPSPEC_SINGLE", {"d1": 1}, 6),  # 4 cycles; half as many again
        ("LOOPSPEC_SINGLE", {"d1": 2}, 3),
        ("LOOPSPEC_DUAL", {"d1": 1, "d2": 3}, 6),
    ],
)
def test_fills_in_what_sglang_sizes_its_pools_by(args, algorithm, options, tokens):
    given = args(override={"trunc": options}, speculative_algorithm=algorithm)
    validate(given)
    assert given.speculative_num_draft_tokens == tokens
    assert given.speculative_num_steps == tokens - 1
    assert given.speculative_eagle_topk == 1
    assert given.enable_mixed_chunk is False


def test_switches_sglangs_own_graphs_off(args):
    """They would be captured at a width that no round of ours runs."""
    given = args(cuda_graph_config=CudaGraphConfig())
    assert given.cuda_graph_config.decode.backend == Backend.FULL
    validate(given)
    graphs = given.cuda_graph_config
    assert graphs.decode.backend == graphs.prefill.backend == Backend.DISABLED


@every_algorithm
@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("tp_size", 2, "--tp-size 2 is not supported by --speculative-algorithm {}; accepted: 1."),
        ("pp_size", 2, "--pp-size 2 is not supported by --speculative-algorithm {}; accepted: 1."),
        ("dp_size", 2, "--dp-size 2 is not"),
        ("enable_lora", True, "--enable-lora True is not supported by --speculative-algorithm {}; accepted: unset"),
        ("lora_paths", ["a=b"], "--lora-paths ['a=b'] is not supported"),
        ("disaggregation_mode", "prefill", "--disaggregation-mode prefill is not"),
        ("enable_dp_attention", True, "--enable-dp-attention True is not"),
        ("enable_hierarchical_cache", True, "--enable-hierarchical-cache True is not"),
        ("kv_cache_dtype", "fp8_e5m2", "--kv-cache-dtype fp8_e5m2 is not"),
        ("speculative_num_steps", 3, "--speculative-num-steps 3 is not"),
        ("speculative_num_draft_tokens", 4, "set the algorithm's own options instead"),
        ("speculative_draft_model_path", "x", "--speculative-draft-model-path x is not"),
        (
            "grammar_backend",
            "outlines",
            "--grammar-backend outlines is not supported by --speculative-algorithm {}; "
            "accepted: xgrammar, llguidance, none, unset.",
        ),
        ("attention_backend", "fa3", "--attention-backend fa3 is not supported by --speculative-algorithm {}"),
        ("decode_attention_backend", "fa3", "--decode-attention-backend fa3 is not"),
    ],
)
def test_server_option_is_refused_by_its_flag(args, algorithm, field, value, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence.format(algorithm))) as caught:
        validate(args(speculative_algorithm=algorithm, **{field: value}))
    assert_one_sentence(caught.value)


@pytest.mark.parametrize("row", _REFUSED, ids=lambda row: row[0])
def test_every_checked_field_exists_in_this_sglang(row):
    """A field that was renamed would be read as not set, and the option silently accepted."""
    from sglang.srt.server_args import ServerArgs

    field, _, flag = row
    assert field in ServerArgs.__struct_fields__
    assert flag == "--" + field.replace("_", "-")


@pytest.mark.parametrize("row", _REFUSED, ids=lambda row: row[0])
def test_every_default_is_accepted(row):
    from sglang.srt.server_args import ServerArgs

    field, accepted, _ = row
    default = getattr(ServerArgs(model_path="none"), field)
    assert default in accepted


@pytest.mark.parametrize(
    ("environment", "override", "sentence"),
    [
        (
            {"D1": "0"},
            None,
            "d1 is 0 (from environment variable SGLANG_TRUNC_D1), but must be a divisor of R = 4 below",
        ),
        (BLOCK | {"D1": "0"}, None, "d1 is 0 (from environment variable SGLANG_TRUNC_D1), but must be an integer from"),
        (BLOCK | {"D1": "5"}, None, "SGLANG_TRUNC_D1), but must be an integer from 1 to 4."),
        (BLOCK | {"D1": "x"}, None, "d1 is 'x' (from environment variable SGLANG_TRUNC_D1), but must be an integer"),
        ({"FOO": "1"}, None, "Environment variable SGLANG_TRUNC_FOO is '1', but the plugin reads only"),
        ({}, {"trunc": {"depth": 2}}, "depth is not an option (trunc of --json-model-override-args), the options are"),
        ({}, {"trunc": {"d1": 5}}, "d1 is 5 (from --json-model-override-args)"),
        ({}, {"trunc": 3}, "trunc of --json-model-override-args is 3, but must be an object."),
        (BLOCK | {"D1": "3"}, {"total_ut_steps": 2}, "SGLANG_TRUNC_D1), but must be an integer from 1 to 2."),
        ({"D1": "2"}, {"total_ut_steps": 2}, "but must be a divisor of R = 2 below it where no block_size is set: 1."),
    ],
)
def test_algorithm_option_is_refused_with_its_source(args, monkeypatch, environment, override, sentence):
    refuse_option(args(override=override), monkeypatch, environment, sentence)


@pytest.mark.parametrize(
    ("algorithm", "environment", "override", "sentence"),
    [
        ("SINGLE", {"D1": "3"}, None, "d1 is 3 (from environment variable SGLANG_TRUNC_D1), but must be a divisor"),
        ("SINGLE", {"D1": "4"}, None, "but must be a divisor of R = 4 below it: 1, 2."),
        ("SINGLE", {}, {"trunc": {"d1": 3}}, "d1 is 3 (from --json-model-override-args), but must be a divisor"),
        ("SINGLE", {"D2": "2"}, None, "d2 is not an option of LOOPSPEC_SINGLE (environment variable SGLANG_TRUNC_D2);"),
        ("SINGLE", {"BLOCK_SIZE": "4"}, None, f"its options are {', '.join(names_of('LOOPSPEC_SINGLE'))}."),
        ("SINGLE", {}, {"total_ut_steps": 1}, "R is 1, but LOOPSPEC_SINGLE needs at least 2"),
        ("SINGLE", {"MAX_WIDTH": "0"}, None, "max_width is 0 (from environment variable SGLANG_TRUNC_MAX_WIDTH)"),
        ("DUAL", {"D1": "2"}, None, "but must be a divisor of R = 4 below R / 2, so that d2 fits between d1 and R: 1."),
        ("DUAL", {"D2": "1"}, None, "d2 is 1 (from environment variable SGLANG_TRUNC_D2), but must be a multiple"),
        ("DUAL", {"D2": "4"}, None, "but must be a multiple of d1 = 1 between d1 and R = 4: 2, 3."),
        ("DUAL", {"D1": "2", "D2": "3"}, {"total_ut_steps": 8}, "d2 is 3 (from environment variable SGLANG_TRUNC_D2)"),
        ("DUAL", {}, {"trunc": {"draft_threshold": 0.1}}, "draft_threshold is not an option of LOOPSPEC_DUAL"),
        ("DUAL", {"BLOCK_SIZE": "4"}, None, "block_size is not an option of LOOPSPEC_DUAL"),
        ("DUAL", {"MIN_SURVIVAL": "1.5"}, None, "min_survival is 1.5 (from environment variable"),
        ("DUAL", {}, {"total_ut_steps": 2}, "R is 2, but LOOPSPEC_DUAL needs at least 3"),
    ],
)
def test_pipeline_option_is_refused_with_its_source(args, monkeypatch, algorithm, environment, override, sentence):
    given = args(override=override, speculative_algorithm=f"LOOPSPEC_{algorithm}")
    refuse_option(given, monkeypatch, environment, sentence)


def refuse_option(given, monkeypatch, environment, sentence) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(f"SGLANG_TRUNC_{name}", value)
    with pytest.raises(OptionError) as caught:
        validate(given)
    assert sentence in str(caught.value)
    assert_one_sentence(caught.value)


@every_algorithm
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("enable_deterministic_inference", True),
        ("grammar_backend", "llguidance"),
        ("enable_custom_logit_processor", True),
    ],
)
def test_server_option_is_accepted(args, algorithm, field, value):
    validate(args(speculative_algorithm=algorithm, **{field: value}))


def test_override_that_is_not_json_is_refused(args):
    with pytest.raises(OptionError, match="--json-model-override-args is not readable JSON"):
        validate(args(override="{trunc"))


def test_the_plugins_other_variables_are_known(args, monkeypatch, tmp_path):
    """Those of files are looked at, too; the controller's have a meaning where there is one."""
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"tick": {"1": 1.0}, "readout": {"1": 0.5}}))
    values = dict.fromkeys(OTHER_ENVIRONMENT, str(tmp_path / "new")) | {COST_ENV: str(table)}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    validate(args(override={"trunc": {"lookup": 0}}))


def test_early_exit_is_refused_where_it_is_asked_for(args, tiny_checkpoint, tmp_path):
    config = json.loads((tiny_checkpoint("ouro") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "early_exit_threshold": 0.5}))
    for given in (args(override={"early_exit_threshold": 0.5}), args(model_path=str(tmp_path))):
        with pytest.raises(ValueError, match=r"early_exit_threshold is 0\.5") as caught:
            validate(given)
        assert_one_sentence(caught.value)


def test_fewer_recurrences_are_accepted(args):
    given = args(override={"total_ut_steps": 2})
    validate(given)


@every_algorithm
def test_a_model_without_a_loop_is_refused(args, algorithm):
    with pytest.raises(ValueError, match=f"{algorithm} needs a looped model .* is LlamaForCausalLM") as caught:
        validate(args("llama", speculative_algorithm=algorithm))
    assert_one_sentence(caught.value)


@every_algorithm
@pytest.mark.parametrize("family", ["ouro", "ouro-gqa", "huginn", "retro-llama", "retro-olmo2"])
def test_every_family_is_accepted(args, family, algorithm):
    validate(args(family, speculative_algorithm=algorithm))


def assert_one_sentence(error: BaseException) -> None:
    text = str(error)
    assert "\n" not in text
    assert text.endswith(".")
    assert ". " not in text.replace("0. ", "")


# --- the class SGLang asks ---


def public_methods(cls: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(cls, inspect.isroutine) if not name.startswith("_")}


def test_algorithm_has_every_method_of_sglangs_own():
    """``CustomSpecAlgo`` lacks some that the scheduler calls; ``register`` and the parsers belong to the enum."""
    enum_only = {"register", "from_string", "to_bytes", "from_bytes"} | public_methods(int) | public_methods(str)
    missing = public_methods(SpeculativeAlgorithm) - public_methods(LoopedAlgorithm) - enum_only
    assert not missing


def test_methods_of_ours_take_what_sglangs_own_take():
    for name in public_methods(CustomSpecAlgo) & public_methods(SpeculativeAlgorithm):
        theirs = inspect.signature(getattr(SpeculativeAlgorithm, name)).parameters
        ours = inspect.signature(getattr(LoopedAlgorithm, name)).parameters
        flexible = {p.kind for p in ours.values()} & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
        assert flexible or set(theirs) <= set(ours), name


def test_it_is_none_of_sglangs_algorithms():
    """Joining a family by a predicate would switch on its side effects: bigram radix keys, draft hidden states."""
    algorithm = SpeculativeAlgorithm.from_string("TRUNC")
    assert isinstance(algorithm, LoopedAlgorithm)
    claims = {name for name in public_methods(LoopedAlgorithm) if name.startswith("is_") and getattr(algorithm, name)()}
    assert claims <= {"is_some", "is_speculative"}
    assert not algorithm.has_draft_kv()
    assert not algorithm.carries_draft_hidden_states()
    assert not algorithm.need_topk()
