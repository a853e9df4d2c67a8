"""Tensor names of a checkpoint, read without loading a tensor, and the Raven block kind they imply.

Raven's three block kinds share one class name and one config layout; only the tensors tell them apart:
``q_norm`` means "olmo2", ``norm_3`` means "huginn", neither means "llama". The answer is needed when the
model is built, which SGLang does before it fetches weights, so that names are taken from the index file or
the safetensors headers of a local folder, or for a Hub repository from its index or by range requests.

`detect_block_kind` is the one entry; an explicit `block_kind` in the config is taken unread, which is also
the way to build a model with dummy weights.
"""

import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sglang_trunc.models.configs import BLOCK_KINDS

INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
# A header holds about 100 bytes per tensor; anything beyond this is not a safetensors file.
MAX_HEADER_BYTES = 100_000_000


def detect_block_kind(config: Any, model_path: str | Path | None = None, revision: str | None = None) -> str:
    """One of BLOCK_KINDS; `model_path` defaults to where the config was read from."""
    if config.block_kind is not None:
        return str(config.block_kind)
    path = str(model_path or config.name_or_path)
    names = tensor_names(path, revision)
    if not names:
        raise ValueError(
            f"block_kind is null and {path!r} has no readable tensor names to tell it from; "
            f"set block_kind to one of {', '.join(BLOCK_KINDS)}."
        )
    return block_kind_of(names)


def block_kind_of(names: Iterable[str]) -> str:
    core = {name for name in names if name.startswith("transformer.core_block.")}
    if not core:
        raise ValueError("The checkpoint has no transformer.core_block tensors, so it is not a Raven model.")
    if any(".q_norm." in name for name in core):
        return "olmo2"
    return "huginn" if any(".norm_3." in name for name in core) else "llama"


def tensor_names(path: str, revision: str | None = None) -> set[str]:
    """Names of all tensors of a local folder or Hub repository; empty if there is nothing to read."""
    folder = Path(path)
    return _local_names(folder) if folder.is_dir() else _hub_names(path, revision)


def _local_names(folder: Path) -> set[str]:
    for index in INDEX_FILES:
        if (folder / index).is_file():
            return _index_names(folder / index)
    return {name for file in sorted(folder.glob("*.safetensors")) for name in _header_names(file)}


def _index_names(file: Path) -> set[str]:
    return set(json.loads(file.read_text(encoding="utf-8"))["weight_map"])


def _header_names(file: Path) -> set[str]:
    with file.open("rb") as stream:
        prefix = stream.read(8)
        size = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else MAX_HEADER_BYTES
        header = stream.read(size) if size < MAX_HEADER_BYTES else b""
    try:
        return set(json.loads(header)) - {"__metadata__"}
    except ValueError as error:
        raise ValueError(f"{file} is not a readable safetensors file; it may be incomplete.") from error


def _hub_names(repository: str, revision: str | None) -> set[str]:
    import httpx
    import huggingface_hub as hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, NotASafetensorsRepoError

    for index in INDEX_FILES:
        cached = hub.try_to_load_from_cache(repository, index, revision=revision)
        if isinstance(cached, str):
            return _index_names(Path(cached))
    cached = hub.try_to_load_from_cache(repository, "model.safetensors", revision=revision)
    if isinstance(cached, str):
        return _header_names(Path(cached))
    try:
        metadata = hub.get_safetensors_metadata(repository, revision=revision)
    except (HfHubHTTPError, HFValidationError, NotASafetensorsRepoError, OSError, httpx.HTTPError):
        return set()
    return set(metadata.weight_map)
