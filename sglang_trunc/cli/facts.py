"""What a checkpoint's own files say, read without loading the model.

``stop_token_ids`` is the set of tokens that end an answer: the end-of-text ids of config.json and
generation_config.json and the tokenizer's ``eos_token``. ``bundled_model`` finds a demo checkpoint in the
package. A Hub name is resolved through huggingface_hub's cache; only the small JSON files are read.
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

BUNDLED = ("ouro", "raven")


def bundled_model(name: str) -> Path:
    """Folder of a demo checkpoint that ships with the package."""
    folder = Path(str(resources.files("sglang_trunc").joinpath("demos", name)))
    if not (folder / "config.json").exists():
        raise FileNotFoundError(f"this installation has no demo model {name!r} (expected {folder})")
    return folder


def read_json(model_path: str, name: str) -> dict[str, Any]:
    """One JSON file of a checkpoint; empty when the checkpoint has none."""
    local = Path(model_path) / name
    if not Path(model_path).is_dir():
        found = _from_hub(model_path, name)
        if found is None:
            return {}
        local = found
    return dict(json.loads(local.read_text(encoding="utf-8"))) if local.exists() else {}


def _from_hub(repository: str, name: str) -> Path | None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(repository, name))
    except LocalEntryNotFoundError:
        raise
    except EntryNotFoundError:
        return None


def stop_token_ids(model_path: str) -> frozenset[int]:
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        value = read_json(model_path, name).get("eos_token_id")
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(ids | _tokenizer_eos(model_path))


def _tokenizer_eos(model_path: str) -> set[int]:
    eos = read_json(model_path, "tokenizer_config.json").get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    added = read_json(model_path, "tokenizer.json").get("added_tokens", []) if text else []
    return {int(token["id"]) for token in added if token["content"] == text}
