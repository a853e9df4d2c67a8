"""End ids and thinking tags on small tokenizers with the published special tokens and stale configs."""

import json
import subprocess
import sys

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models

from sglang_trunc.models import tokenizers as tokenizers_module
from sglang_trunc.models.configs import register
from sglang_trunc.models.tokenizers import (
    TokenizerFacts,
    hooks,
    keep_thinking_tags,
    read_facts,
    resolve_eos_ids,
    unmark_special,
)

OURO_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
OURO_CONFIG = {
    "model_type": "ouro",
    "architectures": ["OuroForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_ouro.OuroConfig"},
    "vocab_size": 300,
    "eos_token_id": 0,
}
RAVEN_CONFIG = {
    "model_type": "huginn_raven",
    "architectures": ["RavenForCausalLM"],
    "auto_map": {"AutoConfig": "raven_config_minimal.RavenConfig"},
    "vocab_size": 70000,
    "bos_token_id": 65504,
    "eos_token_id": 65505,
    "pad_token_id": 65509,
}


def byte_tokenizer(special: tuple[str, ...], special_last: bool = False) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    entries = [*alphabet, *special] if special_last else [*special, *alphabet]
    tokenizer = Tokenizer(tokenizer_models.BPE({text: i for i, text in enumerate(entries)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return tokenizer


def save(folder, tokenizer: Tokenizer, config: dict, settings: dict, old_style: bool = False) -> str:
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    if old_style:
        added = json.loads(tokenizer.to_str())["added_tokens"]
        settings["added_tokens_decoder"] = {str(token.pop("id")): token for token in added}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture
def thinking_repository(tmp_path):
    settings = {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>", "pad_token": "<|im_end|>"}
    return save(tmp_path, byte_tokenizer(OURO_SPECIAL), OURO_CONFIG, settings, old_style=True)


@pytest.fixture
def retrofit_repository(tmp_path):
    tokenizer = byte_tokenizer(("<|begin_of_text|>", "<|end_of_text|>"), special_last=True)
    eos = {"__type": "AddedToken", "content": "<|end_of_text|>", "special": True}
    settings = {"eos_token": eos, "bos_token": "<|begin_of_text|>"}
    path = save(tmp_path, tokenizer, RAVEN_CONFIG, settings)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [65505, 65508]}))
    return path


@pytest.fixture(scope="module")
def hooked():
    """SGLang with the two hooks applied, as the plugin loader does it."""
    pytest.importorskip("sglang")
    from sglang.srt.plugins.hook_registry import HookRegistry

    register()
    tokenizers_module.register()
    tokenizers_module.register()
    HookRegistry.apply_hooks()
    with pytest.MonkeyPatch.context() as patch:
        # Another test of this process may have published launch arguments; here nothing is launched.
        patch.setattr(tokenizers_module, "_launched", lambda *_: None)
        yield HookRegistry


# Facts from files


def test_facts_of_an_old_style_repository(thinking_repository):
    facts = read_facts(thinking_repository)
    assert facts == TokenizerFacts(1, 2, 2, {text: i for i, text in enumerate(OURO_SPECIAL)})


def test_facts_of_a_new_style_repository_come_from_tokenizer_json(retrofit_repository):
    facts = read_facts(retrofit_repository)
    assert facts == TokenizerFacts(256, 257, None, {"<|begin_of_text|>": 256, "<|end_of_text|>": 257})


def test_names_may_stand_in_the_special_tokens_map(tmp_path):
    path = save(tmp_path, byte_tokenizer(OURO_SPECIAL), OURO_CONFIG, {})
    assert read_facts(path).eos_id is None
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|endoftext|>"}}))
    assert read_facts(path).eos_id == 0


def test_end_token_may_be_a_plain_vocabulary_entry(tmp_path):
    path = save(tmp_path, byte_tokenizer(("<think>",)), OURO_CONFIG, {"eos_token": "!"})
    assert read_facts(path).eos_id == Tokenizer.from_file(f"{path}/tokenizer.json").token_to_id("!")


@pytest.mark.parametrize("path", ["/no/such/folder", "."])
def test_no_tokenizer_means_no_facts(path):
    assert read_facts(path) is None


# Which ids end a request


@pytest.mark.parametrize(
    ("model_type", "configured", "special", "eos_id", "expected"),
    [
        pytest.param("ouro", {0}, dict(zip(OURO_SPECIAL, range(5), strict=True)), 0, {0, 2}, id="Ouro base"),
        pytest.param("ouro", {2}, dict(zip(OURO_SPECIAL, range(5), strict=True)), 2, {0, 2}, id="Thinking"),
        pytest.param(
            "huginn_raven",
            {65505, 65508},
            {"<|begin_text|>": 65504, "<|end_text|>": 65505, "<|end_turn|>": 65508, "<|pad|>": 65509},
            65505,
            {65505, 65508},
            id="Huginn",
        ),
        pytest.param(
            "huginn_raven",
            {65505},
            {"<|begin_of_text|>": 128000, "<|end_of_text|>": 128001},
            128001,
            {128001},
            id="retrofitted Llama",
        ),
        pytest.param("huginn_raven", {65505}, {"<s>": 1, "</s>": 2}, 2, {2}, id="retrofitted TinyLlama"),
        pytest.param("ouro", {7}, {}, 7, {7}, id="eos that is not flagged special"),
    ],
)
def test_end_ids(model_type, configured, special, eos_id, expected):
    facts = TokenizerFacts(None, eos_id, None, special)
    assert resolve_eos_ids(model_type, configured, facts) == expected


def test_model_config_of_a_retrofit_stops_at_the_tokenizers_eos(hooked, retrofit_repository):
    from sglang.srt.configs.model_config import ModelConfig

    model_config = ModelConfig(retrofit_repository)
    assert model_config.hf_eos_token_id == {257}
    config = model_config.hf_config
    assert (config.eos_token_id, config.bos_token_id, config.pad_token_id) == ([257], 256, None)


def test_model_config_of_ouro_stops_at_both_end_tokens(hooked, thinking_repository):
    from sglang.srt.configs.model_config import ModelConfig

    assert ModelConfig(thinking_repository).hf_eos_token_id == {0, 2}


def test_explicit_override_of_the_end_id_is_obeyed(hooked, thinking_repository):
    from sglang.srt.configs.model_config import ModelConfig

    model_config = ModelConfig(thinking_repository, model_override_args='{"eos_token_id": 9}')
    assert model_config.hf_eos_token_id == {9}


def test_model_without_a_tokenizer_keeps_its_ids(hooked, tmp_path):
    from sglang.srt.configs.model_config import ModelConfig

    (tmp_path / "config.json").write_text(json.dumps(OURO_CONFIG))
    assert ModelConfig(str(tmp_path)).hf_eos_token_id == {0}


def test_tokenizer_of_another_folder_decides(hooked, retrofit_repository, tmp_path, monkeypatch):
    from sglang.srt.configs.model_config import ModelConfig

    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(RAVEN_CONFIG))
    launched = {("serving", "tokenizer_path"): retrofit_repository}
    monkeypatch.setattr(tokenizers_module, "_launched", lambda *key: launched.get(key))
    assert ModelConfig(str(model)).hf_eos_token_id == {257}


# Thinking tags


def test_tags_survive_in_a_tokenizer_folder_without_a_config(thinking_repository, tmp_path, monkeypatch):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(thinking_repository)
    alone = tmp_path / "alone"
    tokenizer.save_pretrained(alone)
    launched = {}
    monkeypatch.setattr(tokenizers_module, "_launched", lambda *key: launched.get(key))
    keep_thinking_tags(tokenizer, tokenizer, str(alone))
    assert tokenizer.decode([3], skip_special_tokens=True) == ""
    launched["model", "model_path"] = thinking_repository
    keep_thinking_tags(tokenizer, tokenizer, str(alone))
    assert tokenizer.decode([3], skip_special_tokens=True) == "<think>"


def test_tags_survive_decoding_in_every_loading_process(hooked, thinking_repository):
    from sglang.srt.managers import detokenizer_manager
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    text = "<|im_start|><think>\nwhy</think> so<|im_end|>"
    for load in (get_tokenizer, detokenizer_manager.get_tokenizer):
        tokenizer = load(thinking_repository)
        ids = tokenizer.encode(text)
        assert ids[:2] == [1, 3]
        assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>\nwhy</think> so"
        assert tokenizer.batch_decode([ids], skip_special_tokens=True) == ["<think>\nwhy</think> so"]
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert tokenizer.eos_token_id == 2


def test_tokenizer_loads_beside_a_config_with_remote_code(hooked, retrofit_repository):
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    assert get_tokenizer(retrofit_repository, trust_remote_code=False).eos_token_id == 257


def test_other_models_keep_their_special_tokens(hooked, tmp_path):
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    path = save(tmp_path, byte_tokenizer(OURO_SPECIAL), {"model_type": "qwen2"}, {"eos_token": "<|im_end|>"})
    tokenizer = get_tokenizer(path)
    assert tokenizer.decode(tokenizer.encode("<think>x"), skip_special_tokens=True) == "x"


def test_listed_tags_are_unlisted_and_others_stay(thinking_repository):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        thinking_repository, extra_special_tokens=["<think>", "</think>", "<|im_start|>"]
    )
    assert "<think>" in tokenizer.all_special_tokens
    assert keep_thinking_tags(tokenizer, tokenizer, thinking_repository) is tokenizer
    assert not {"<think>", "</think>"} & set(tokenizer.all_special_tokens)
    assert "<|im_start|>" in tokenizer.all_special_tokens
    assert tokenizer.decode([1, 3, 4], skip_special_tokens=True) == "<think></think>"


def test_unmarking_twice_changes_nothing_more(thinking_repository):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(thinking_repository)
    unmark_special(tokenizer, ["<think>"])
    backend = tokenizer._tokenizer
    unmark_special(tokenizer, ["<think>", "no such token"])
    assert tokenizer._tokenizer is backend


# The hook table


def test_hooks_are_registered_once_and_applied(hooked):
    for target, function, kind in hooks():
        entries = [entry for entry in hooked._hooks[target] if entry[1] is function]
        assert [entry[0].name for entry in entries] == [kind]
        assert target in hooked._patched


def test_importing_the_module_imports_no_server():
    code = (
        "import sys, sglang_trunc.models.tokenizers as t; t.hooks();"
        "print(any(name in sys.modules for name in ('sglang', 'transformers')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
