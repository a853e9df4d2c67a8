"""Names that the GPU-less platform and the engine share."""

ATTENTION_BACKEND = "cpu_lanes"  # as in --attention-backend
PLATFORM_CLASS = "sglang_trunc.platform.cpu_platform:CpuPlatform"
