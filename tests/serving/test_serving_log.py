"""The failure sentence out of logs as SGLang writes them."""

import pytest

from sglang_trunc.serving.log import failure_sentence, leaks

CHILD_DIED = """\
[2026-11-30 17:00:01] server_args=ServerArgs(model_path='m')
[2026-11-30 17:00:09] Scheduler hit an exception: Traceback (most recent call last):
  File "scheduler.py", line 4, in run_scheduler_process
    scheduler = Scheduler(server_args)
sglang_trunc.models.CheckpointError: checkpoint m lacks the tensor 'model.norm.weight'.
Give a complete checkpoint.

[2026-11-30 17:00:10] Received sigquit from a child process. It usually means the child failed.
Traceback (most recent call last):
  File "engine.py", line 9, in _wait
RuntimeError: Rank 0 scheduler died during initialization (exit code: -3). If exit code is -9 (SIGKILL)
"""


@pytest.mark.parametrize(
    ("log", "sentence"),
    [
        (
            CHILD_DIED,
            "sglang_trunc.models.CheckpointError: checkpoint m lacks the tensor 'model.norm.weight'. "
            "Give a complete checkpoint.",
        ),
        (
            "Traceback (most recent call last):\n  File\nValueError: d1 must be 1 to 4\n",
            "ValueError: d1 must be 1 to 4",
        ),
        ("one\n\ntwo\n", "one\ntwo"),
        ("", "the server wrote nothing to its log"),
        ("KeyboardInterrupt\n", "KeyboardInterrupt"),
        (
            "usage: launch\nlaunch: error: unrecognized arguments: --x\n",
            "usage: launch\nlaunch: error: unrecognized arguments: --x",
        ),
    ],
)
def test_failure_sentence(log, sentence):
    assert failure_sentence(log) == sentence


def test_leak_lines():
    assert leaks("fine\n[x] pool memory leak detected! [full] total=9\n") == [
        "[x] pool memory leak detected! [full] total=9"
    ]
