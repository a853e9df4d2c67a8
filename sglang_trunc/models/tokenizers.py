"""End-of-text ids and thinking tags of looped models, taken from the tokenizer's own files.

Two faults of published repositories are mended, for these model types only; every other model served with
the plugin installed is untouched:

* Config ids are stale. The retrofitted Ravens carry Huginn's 65504/65505/65509, which are words such as
  " creek" in their own vocabularies, and Ouro's lists one of its two end tokens. SGLang stops a request at
  ``ModelConfig.hf_eos_token_id`` (config.json united with generation_config.json) and at the tokenizer's eos.
  `align_special_ids` replaces the first set. An ``eos_token_id`` in ``--json-model-override-args`` is obeyed.
* ``<think>`` and ``</think>`` are flagged special, so that decoding with skip_special_tokens, the default,
  drops them from the text. `keep_thinking_tags` clears the flag right after a tokenizer is loaded. They stay
  single tokens with their ids.

`hooks()` lists both as SGLang hooks. The end ids matter in the scheduler; tokenizers are loaded in the
tokenizer manager, the scheduler and the detokenizer, and the plugin's entry point runs in all of them.
Importing this module imports neither sglang nor transformers.
"""

import json
import logging
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

THINKING_TAGS = ("<think>", "</think>")
# Tokens that end a text or a chat turn, beside the tokenizer's eos. Retrofitted Ravens have neither of
# Huginn's, so that only their tokenizer's own eos is left.
END_TOKENS = {
    "ouro": ("<|endoftext|>", "<|im_end|>"),
    "huginn_raven": ("<|end_text|>", "<|end_turn|>"),
}


class TokenizerFacts(NamedTuple):
    """What the tokenizer's files say, without loading it; an id is None where they name no such token."""

    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    special: dict[str, int]  # text -> id of the added tokens flagged special


def hooks() -> list[tuple[str, Callable[..., Any], str]]:
    """(dotted target, function, name of the HookType)."""
    return [
        ("sglang.srt.configs.model_config.ModelConfig._get_hf_eos_token_id", align_special_ids, "AFTER"),
        ("sglang.srt.utils.hf_transformers.tokenizer._apply_post_load_fixes", keep_thinking_tags, "AFTER"),
    ]


def register() -> None:
    """Put the hooks into SGLang's registry, once; the plugin loader applies them."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, function, kind in hooks():
        if not any(known is function for _, known, _ in HookRegistry._hooks[target]):
            HookRegistry.register(target, function, HookType[kind])


# End ids


def align_special_ids(configured: set[int], model_config: Any) -> set[int]:
    """After ``_get_hf_eos_token_id``: the ids at which requests stop; corrects the config's fields, too."""
    config = model_config.hf_config
    if config.model_type not in END_TOKENS or "eos_token_id" in model_config.model_override_args:
        return configured
    path = _launched("serving", "tokenizer_path") or model_config.model_path
    facts = read_facts(path, model_config.revision)
    if facts is None:
        return configured
    ids = resolve_eos_ids(config.model_type, configured, facts)
    if configured - ids:
        logger.info(
            "Token ids %s end a text by the model's config but not by its tokenizer: requests stop at %s.",
            sorted(configured - ids),
            sorted(ids),
        )
    config.eos_token_id = sorted(ids)
    config.bos_token_id, config.pad_token_id = facts.bos_id, facts.pad_id
    return ids


def resolve_eos_ids(model_type: str, configured: Iterable[int], facts: TokenizerFacts) -> set[int]:
    """The tokenizer's eos, its END_TOKENS, and those configured ids that it flags special."""
    ids = set(configured) & set(facts.special.values())
    ids |= {facts.special[text] for text in END_TOKENS[model_type] if text in facts.special}
    if facts.eos_id is not None:
        ids.add(facts.eos_id)
    return ids


def read_facts(path: str, revision: str | None = None) -> TokenizerFacts | None:
    """None if the folder or repository has no tokenizer that names its tokens."""
    settings = _read_json(path, "tokenizer_config.json", revision) or {}
    special_map = _read_json(path, "special_tokens_map.json", revision) or {}
    added = settings.get("added_tokens_decoder")
    tokens = [{"id": int(key), **token} for key, token in added.items()] if added else None
    whole: dict[str, Any] = {}
    if tokens is None:
        whole = _read_json(path, "tokenizer.json", revision) or {}
        tokens = whole.get("added_tokens", [])
    ids = {token["content"]: token["id"] for token in tokens}
    if not ids:
        return None

    def named(key: str) -> int | None:
        text = _content(settings.get(key, special_map.get(key)))
        if text is None or text in ids:
            return ids.get(text) if text is not None else None
        vocabulary = (whole or _read_json(path, "tokenizer.json", revision) or {}).get("model", {}).get("vocab")
        return vocabulary.get(text) if isinstance(vocabulary, dict) else None

    special = {token["content"]: token["id"] for token in tokens if token.get("special")}
    return TokenizerFacts(named("bos_token"), named("eos_token"), named("pad_token"), special)


def _content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


# Thinking tags


def keep_thinking_tags(result: Any, tokenizer: Any, name: str, revision: str | None = None) -> Any:
    """After SGLang's own fixes of a freshly loaded tokenizer; returns the tokenizer."""
    if _model_type(name, revision) in END_TOKENS:
        unmark_special(result, THINKING_TAGS)
    return result


def unmark_special(tokenizer: Any, texts: Iterable[str]) -> None:
    """Clear the special flag of these added tokens; ids and encoding stay as they are."""
    texts = set(texts)
    tokenizer.extra_special_tokens = [t for t in tokenizer.extra_special_tokens if str(t) not in texts]
    backend: Any = getattr(tokenizer, "_tokenizer", None)
    if not hasattr(backend, "to_str"):
        return  # a slow tokenizer: decoding goes by the list above
    # An added token cannot be changed in place, only written out and read back.
    content = json.loads(backend.to_str())
    marked = [t for t in content["added_tokens"] if t["content"] in texts and t["special"]]
    if marked:
        for token in marked:
            token["special"] = False
        tokenizer._tokenizer = type(backend).from_str(json.dumps(content))


def _model_type(tokenizer_path: str, revision: str | None) -> str | None:
    """Of the model beside the tokenizer, or of the launched one if the tokenizer lies elsewhere."""
    config = _read_json(tokenizer_path, "config.json", revision)
    if config is None and (model_path := _launched("model", "model_path")):
        config = _read_json(model_path, "config.json", _launched("model", "revision"))
    return (config or {}).get("model_type")


# Files and launch settings


def _read_json(path: str, name: str, revision: str | None) -> dict[str, Any] | None:
    """From a folder, or a Hub repository and its cache."""
    from transformers.utils import cached_file

    try:
        found = cached_file(path, name, revision=revision)
    except OSError:
        return None
    if found is None:
        return None
    with open(found, encoding="utf-8") as file:
        content: dict[str, Any] = json.load(file)
    return content


def _launched(namespace: str, field: str) -> Any:
    """A resolved server argument, or None where this process has published none yet."""
    from sglang.srt import runtime_context

    try:
        return getattr(getattr(runtime_context, f"get_{namespace}")(), field)
    except ValueError:
        return None
