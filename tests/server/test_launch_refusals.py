"""A launch that cannot work ends with one sentence; and what a broken installation says.

Only the cases that need a real launch: the others go through the same checks in ``tests/engine/test_algorithm.py``,
``test_seams.py`` and ``tests/models``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable

import pytest
from safetensors.torch import load_file, save_file

from sglang_trunc.serving.server import Server, StartError
from tests.server.setups import ENVIRONMENT

FLAGS = ("--skip-server-warmup", "--max-total-tokens", "512")
# Runs the named module as if SGLang had renamed a method that the plugin relies on.
BROKEN = """
import runpy, sys
from sglang.srt.managers.schedule_batch import Req
del Req.set_finish_with_abort
if __name__ == "__main__":
    runpy.run_module(MODULE, run_name="__main__")
"""
SEAM = "sglang.srt.managers.schedule_batch.Req.set_finish_with_abort"


def refusal(
    model, *flags: str, algorithm: str = "trunc", module: str = "sglang.launch_server", **environment: str
) -> str:
    flags = ("--speculative-algorithm", algorithm, *FLAGS, *flags)
    server = Server(str(model), flags, {**ENVIRONMENT, **environment}, name="refused", module=module)
    with pytest.raises(StartError) as caught:
        server.start()
    assert server.log_path is not None
    server.log_path.unlink()
    return str(caught.value)


def test_option_out_of_range(tiny_checkpoint):
    said = refusal(tiny_checkpoint("ouro"), SGLANG_TRUNC_D1="5")
    assert "d1 is 5 (from environment variable SGLANG_TRUNC_D1), but must be a divisor of R = 4" in said


def test_second_depth_at_full_depth(tiny_checkpoint):
    said = refusal(tiny_checkpoint("ouro"), algorithm="loopspec_dual", SGLANG_TRUNC_D2="4")
    assert "d2 is 4 (from environment variable SGLANG_TRUNC_D2), but must be a multiple of d1 = 1" in said


def test_two_ranks(tiny_checkpoint):
    said = refusal(tiny_checkpoint("ouro"), "--tp-size", "2", SGLANG_CPU_OMP_THREADS_BIND="0|1")
    assert "--tp-size 2 is not supported by --speculative-algorithm TRUNC; accepted: 1." in said


def test_checkpoint_with_a_missing_tensor(tiny_checkpoint, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(tiny_checkpoint("huginn"), broken)
    tensors = load_file(broken / "model.safetensors")
    missing = "transformer.core_block.1.attn.Wqkv.weight"
    del tensors[missing]
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    assert missing in refusal(broken)


@pytest.fixture
def broken_sglang(tmp_path) -> Callable[[str], dict[str, str]]:
    """Makes ``broken_sglang`` run a module; the environment in which ``python -m broken_sglang`` works."""

    def run(module: str) -> dict[str, str]:
        (tmp_path / "broken_sglang.py").write_text(BROKEN.replace("MODULE", repr(module)))
        return {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}

    return run


def test_renamed_seam_at_launch(tiny_checkpoint, broken_sglang):
    environment = broken_sglang("sglang.launch_server")
    said = refusal(tiny_checkpoint("ouro"), module="broken_sglang", **environment)
    assert "sglang-trunc is installed but cannot run here" in said
    assert f"{SEAM}: not found" in said
    assert "pip install 'sglang==0.5.23'" in said


def test_renamed_seam_in_doctor(broken_sglang):
    environment = broken_sglang("sglang_trunc.cli.app")
    done = subprocess.run(
        [sys.executable, "-m", "broken_sglang", "doctor"],
        env={**os.environ, **ENVIRONMENT, **environment, "COLUMNS": "400"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    assert SEAM in said
    assert "pip install 'sglang==0.5.23'" in said
