"""SGLang's two entry points into this package.

``register`` (group ``sglang.srt.plugins``) runs once in every SGLang process: launcher, tokenizer manager,
scheduler, detokenizer. It checks the seams, then registers configs, model classes, hooks and the algorithms.
SGLang logs and swallows what a plugin raises, and the user would see "Unknown speculative algorithm"; so on a
failure the algorithm names are registered as stubs whose argument check raises the real reason.

``activate_platform`` (group ``sglang.srt.platforms``) names the GPU-less platform where no accelerator is
present, else nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os

from sglang_trunc.engine.names import ALGORITHMS
from sglang_trunc.platform.names import PLATFORM_CLASS
from sglang_trunc.platform.threads import prepare_environment

logger = logging.getLogger(__name__)

MODEL_PACKAGE = "sglang_trunc.models"


def register() -> None:
    """Install everything, or stubs that say why not. Safe to call twice."""
    from sglang.srt.speculative import spec_registry

    if spec_registry.get_spec(ALGORITHMS[0]) is not None:
        return
    # Read when SGLang's model registry is first imported, also by the seam check; children inherit it.
    packages = os.environ.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", MODEL_PACKAGE)
    try:
        from sglang_trunc import seams

        seams.require_all()
        _register_models(packages)
        _prepare_platform()
        from sglang_trunc.engine import install

        install.install()
    except Exception as error:
        logger.exception("sglang-trunc could not be installed into this SGLang")
        _register_stubs(f"sglang-trunc is installed but cannot run here: {error}")


def activate_platform() -> str | None:
    """The GPU-less platform's class path where no accelerator is present; None elsewhere."""
    import torch

    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        return None  # the user asked for SGLang's own CPU engine
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type != "cpu":
        return None
    prepare_environment()
    return PLATFORM_CLASS


def _register_models(packages: str) -> None:
    from sglang_trunc.models import configs, tokenizers

    configs.register()
    tokenizers.register()
    if packages != MODEL_PACKAGE:  # the user has a package there already: add ours beside it
        from sglang.srt.models.registry import ModelRegistry

        ModelRegistry.register(MODEL_PACKAGE)


def _prepare_platform() -> None:
    from sglang.srt.platforms import current_platform

    if type(current_platform).__name__ == PLATFORM_CLASS.rpartition(":")[2]:
        from sglang_trunc.platform import defaults, sampling

        defaults.install()
        sampling.install()


def _register_stubs(reason: str) -> None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    def refuse(_server_args) -> None:
        raise ValueError(reason)

    for name in ALGORITHMS:
        SpeculativeAlgorithm.register(name, validate_server_args=refuse)(lambda _args: None)
    with contextlib.suppress(Exception):
        # The argument check comes after the model's config was read, which must not fail first.
        from sglang_trunc.models import configs

        configs.register()
