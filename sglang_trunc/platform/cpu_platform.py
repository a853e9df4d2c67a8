"""SGLang platform for machines without an accelerator.

Stock SGLang 0.5.23 has no working server on a plain CPU: its own CPU engine needs compiled kernels that the
wheel lacks. This platform supplies what is missing, from torch, numba and the standard library alone: a
device description, defaults that make ``launch_server --model-path M`` work as it stands, an attention
backend over independent rows (``lane_backend``), prepacked linear layers and fused elementwise operations.

Chosen by ``plugin.activate_platform`` only where no accelerator is present. It is the reference platform of
the project as well: every row of every product gets the same bits whatever the other rows are, so plain
decoding and all speculative schedules agree bit for bit, in bf16 too.
"""

from __future__ import annotations

import os

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from sglang_trunc.platform.names import ATTENTION_BACKEND


class CpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Out-of-tree CPU platform."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    # Triton kernels launch on a CPU only through the interpreter.
    capabilities = PlatformCapabilities(supports_triton=os.environ.get("TRITON_INTERPRET") == "1")

    def get_device(self, device_id: int = 0) -> str:
        # ServerArgs takes this as the default of --device and splits it as a string.
        return "cpu"

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "eager"  # no server of ours compiles C++ between two tokens

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return False  # the in-tree algorithms need kernels that are absent here

    def apply_server_args_defaults(self, server_args) -> None:
        """Defaults a CPU needs; whatever the user gave stays."""
        server_args.device = "cpu"
        if server_args.sampling_backend is None:
            server_args.sampling_backend = "pytorch"
        # An idle scheduler polls; here it would take a core from whoever else works on the machine.
        server_args.sleep_on_idle = True
        server_args.disable_cuda_graph = True
        server_args.disable_prefill_cuda_graph = True
        if server_args.mem_fraction_static is None:
            # Weights live in the same memory as everything else on the machine.
            server_args.mem_fraction_static = 0.5

    def init_backend(self) -> None:
        from sglang_trunc.platform import lane_backend, threads

        threads.configure()
        lane_backend.register()

    def post_load_model(self, model: torch.nn.Module) -> None:
        from sglang_trunc.platform.prepare import prepare_model

        prepare_model(model)
