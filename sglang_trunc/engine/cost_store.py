"""Where a server's cost table comes from: a file that was named, configs/, an earlier start, or a measurement.

A kept table names what it was made for (model, shape, dtype, device, threads, versions), and is used for nothing else.
Deleting the file has it measured again; a folder that cannot be written costs a measurement a start. Copied to configs/
as ``NAME.cost.json``, it serves every model of the shape on that device, whatever the versions.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import torch

from sglang_trunc.core.cycle_cost import CostTable, table_from
from sglang_trunc.core.presets import COSTS, ModelShape, preset_folder
from sglang_trunc.engine import cost
from sglang_trunc.engine.names import CACHE_ENV, COST_ENV
from sglang_trunc.engine.options import read_table
from sglang_trunc.engine.rows import RowRunner

logger = logging.getLogger(__name__)


def table_for(runner: RowRunner, model_config: Any, most: int) -> CostTable:
    """The table of a server that runs up to ``most`` rows. ``model_config``: SGLang's."""
    if named := os.environ.get(COST_ENV):
        logger.info("cost table from %s", named)
        return read_table(Path(named))
    made_for = _made_for(model_config, runner.req_to_token.device, most)
    if (shipped := _shipped(made_for, preset_folder())) is not None:
        logger.info("cost table from %s", shipped.name)
        return table_from(json.loads(shipped.read_text(encoding="utf-8")))
    path = _path(made_for)
    with suppress(OSError, ValueError):
        kept = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(kept, dict) and kept.get("made_for") == made_for:
            logger.info("cost table of an earlier start, %s; delete it to have it measured again", path)
            return table_from(kept)
    begin = time.perf_counter()
    table = cost.measure(runner, cost.context_for(runner.pool.size), most)
    _keep(path, made_for, table)
    logger.info("cost table measured in %.1f s, kept in %s", time.perf_counter() - begin, path)
    return table


def _made_for(model_config: Any, device: torch.device, most: int) -> dict[str, Any]:
    return {
        "model": Path(model_config.model_path).name,
        "shape": ModelShape.of(model_config.hf_config)._asdict(),
        "dtype": str(model_config.dtype).removeprefix("torch."),
        "device": device_name(device),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "rows": most,
        "versions": {name: importlib.metadata.version(name) for name in ("sglang", "sglang-trunc", "torch")},
    }


def device_name(device: torch.device) -> str:
    """As its maker calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return device.type


def _shipped(made_for: Mapping[str, Any], folder: Traversable) -> Traversable | None:
    """A file of configs/ that was made for this shape, dtype, device and number of threads, and for as many rows."""
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if not file.name.endswith(COSTS):
            continue
        theirs = json.loads(file.read_text(encoding="utf-8"))["made_for"]
        same = all(theirs[key] == made_for[key] for key in ("shape", "dtype", "device", "threads"))
        if same and theirs["rows"] >= made_for["rows"]:
            return file
    return None


def _path(made_for: Mapping[str, Any]) -> Path:
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = os.environ.get(CACHE_ENV) or caches / "sglang-trunc"
    digest = hashlib.sha256(json.dumps(made_for, sort_keys=True).encode()).hexdigest()[:16]
    return Path(folder) / f"cost-{made_for['model']}-{digest}.json"


def _keep(path: Path, made_for: Mapping[str, Any], table: CostTable) -> None:
    """In one step, since servers may start at the same time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump({"made_for": made_for, **table._asdict()}, file, indent=2)
        os.replace(file.name, path)
    except OSError as problem:
        logger.warning("the cost table could not be kept: %s", problem)
