"""The GPU-less platform's place in SGLang's argument resolution.

SGLang's own CPU step would choose the Intel AMX backend, whose kernels the wheel lacks, before the platform
is asked; this step comes first and leaves whatever the user gave. The deterministic step accepts the backends of two
lists; ours is row-independent and reads cached prefixes like any other tokens, so it stands in both.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.arg_groups.choices import (
    add_deterministic_attention_backend_choices,
    add_radix_supported_deterministic_attention_backend_choices,
)
from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

from sglang_trunc.platform.names import ATTENTION_BACKEND


def install() -> None:
    """Put ``choose_backend`` around SGLang's ``handle_cpu_backends``, and our backend on the deterministic lists."""
    register_resolution_hook("handle_cpu_backends")(choose_backend)
    add_deterministic_attention_backend_choices([ATTENTION_BACKEND])
    add_radix_supported_deterministic_attention_backend_choices([ATTENTION_BACKEND])


def choose_backend(server_args: Any, previous: Any) -> None:
    """Declare our attention backend as the default, then run SGLang's step."""
    view = resolving_view(server_args)
    if view.device == "cpu" and view.attention_backend is None:
        declare_resolution(server_args, "sglang_trunc", attention_backend=ATTENTION_BACKEND)
    previous(server_args)
