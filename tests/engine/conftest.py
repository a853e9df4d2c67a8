"""One process with SGLang's context published, so that real models, pools and lanes can be built without a server."""

from __future__ import annotations

import os
import types
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.engine.stand import Stand

if TYPE_CHECKING:
    from tests.engine.tree_stand import TreeStand


@pytest.fixture(scope="session")
def sglang_context(tiny_checkpoint, tmp_path_factory):
    """Plugins loaded, arguments published, a gloo group of one: what a scheduler process has before its model."""
    before = dict(os.environ)
    from sglang.srt import runtime_context
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    args = ServerArgs(model_path=str(tiny_checkpoint("ouro")), dtype="float32", skip_server_warmup=True)
    runtime_context.publish(args, role="scheduler", ranks=runtime_context.SpawnRanks(world_rank=0))
    rendezvous = tmp_path_factory.mktemp("gloo") / "rendezvous"
    init_distributed_environment(
        world_size=1, rank=0, local_rank=0, distributed_init_method=f"file://{rendezvous}", backend="gloo"
    )
    initialize_model_parallel()
    # What this process set for children of its own must not reach the servers that other tests start.
    for name in set(os.environ) - set(before):
        del os.environ[name]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield runtime_context
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def served_model(sglang_context, tiny_checkpoint) -> Callable[..., torch.nn.Module]:
    """``served_model(family, **options)``: the SGLang model class of a tiny checkpoint, weights loaded."""
    from safetensors.torch import load_file
    from sglang.srt.model_loader.utils import set_default_torch_dtype
    from transformers import AutoConfig

    from sglang_trunc.models.ouro import OuroForCausalLM
    from sglang_trunc.models.raven import RavenForCausalLM
    from sglang_trunc.platform.prepare import prepare_model

    classes = {"OuroForCausalLM": OuroForCausalLM, "RavenForCausalLM": RavenForCausalLM}
    built: dict[Path, torch.nn.Module] = {}

    def model(family: str, **options):
        directory = tiny_checkpoint(family, **options)
        if directory not in built:
            config = AutoConfig.from_pretrained(directory)
            config._name_or_path = str(directory)
            with set_default_torch_dtype(options.get("dtype", torch.float32)):
                loaded = classes[config.architectures[0]](config)
            loaded.load_weights(load_file(directory / "model.safetensors").items())
            prepare_model(loaded)
            built[directory] = loaded.eval()
        return built[directory]

    return model


@pytest.fixture
def make_stand(served_model, monkeypatch) -> Callable[..., Stand]:
    """``make_stand(family, width=..., requests=..., attention="cpu")``: lanes over a NaN-filled pool."""
    from sglang_trunc.engine.kv_pool import POISON_ENV

    monkeypatch.setenv(POISON_ENV, "1")

    def stand(family: str, checkpoint: dict | None = None, **options) -> Stand:
        return Stand(served_model(family, **(checkpoint or {})), **options)

    return stand


@pytest.fixture
def make_tree_stand(served_model, monkeypatch) -> Callable[..., TreeStand]:
    """``make_tree_stand(family, checkpoint, plan, ...)``: the same for lanes that outlive a round."""
    from sglang_trunc.engine.kv_pool import POISON_ENV
    from tests.engine.tree_stand import TreeStand

    monkeypatch.setenv(POISON_ENV, "1")

    def stand(family: str, checkpoint: dict, *args, **options) -> TreeStand:
        return TreeStand(served_model(family, **checkpoint), *args, **options)

    return stand


@pytest.fixture(scope="session")
def plain(served_model):
    """``plain(family, checkpoint, prompt, wanted)``: ``plain_stand.plain_decoding``, each once."""
    from tests.engine.plain_stand import plain_decoding

    known = {}

    def decode(family: str, checkpoint: dict, prompt: list[int], wanted: int):
        key = repr((family, checkpoint, prompt, wanted))
        if key not in known:
            known[key] = plain_decoding(served_model(family, **checkpoint), prompt, wanted)
        return known[key]

    return decode


@pytest.fixture
def request_stub(tiny_checkpoint) -> Callable[..., types.SimpleNamespace]:
    """A ``Req`` as far as admission and budgets look at it."""

    def make(**sampling) -> types.SimpleNamespace:
        from sglang.srt.sampling.sampling_params import SamplingParams
        from transformers import AutoTokenizer

        params = SamplingParams(**{"temperature": 0.0, **sampling})
        params.normalize(AutoTokenizer.from_pretrained(tiny_checkpoint("ouro")))
        return types.SimpleNamespace(
            sampling_params=params,
            output_ids=[],
            to_finish=None,
            custom_logit_processor=None,
            return_hidden_states=False,
            input_embeds=None,
            customized_info=None,
        )

    return make
