"""Starting, explaining, pausing and stopping a server process; the launched module is the fake one."""

import os
import secrets
import socket
import time

import pytest

from sglang_trunc.serving.server import Server, ServerError, StartError, free_port

pytestmark = pytest.mark.usefixtures("fake_path")


def fake(*args, **env):
    return Server("model", args, env, module="fake_sglang", start_timeout=30)


def group_exists(pgid):
    try:
        os.killpg(pgid, 0)
    except ProcessLookupError:
        return False
    return True


def test_serves_and_leaves_nothing_behind():
    with fake() as server, server.client() as client:
        assert client.generate([1, 2], max_new_tokens=3).completion_tokens == 3
        assert server.start_seconds > 0
        pgid, log = server._process.pid, server.log_path
        assert group_exists(pgid)
        assert server.is_alive()
    assert not group_exists(pgid)
    assert not server.is_alive()
    assert not log.exists()
    server.stop()


def test_flags_and_environment_reach_the_server():
    with fake("--speculative-algorithm", "trunc", FAKE_BLOCK="2") as server, server.client() as client:
        answer = client.generate([1], max_new_tokens=5, stream=True)
        assert [chunk.tokens for chunk in answer.chunks] == [1, 3, 5]


def test_failed_start_says_why_and_keeps_the_log():
    server = fake(FAKE_FAIL="d1 is 5, but this model has 4 recurrences.")
    with pytest.raises(StartError, match="exit code 1: ValueError: d1 is 5, but this model has 4 rec") as caught:
        server.start()
    assert server.log_path.exists()
    assert str(server.log_path) in str(caught.value)
    assert "Traceback" in server.log_tail()
    server.log_path.unlink()


def test_start_gives_up_after_its_timeout(tmp_path):
    (tmp_path / "sleeper.py").write_text("import time; print('loading', flush=True); time.sleep(60)")
    server = Server("m", env={"PYTHONPATH": str(tmp_path)}, module="sleeper", start_timeout=1.0)
    begin = time.perf_counter()
    with pytest.raises(StartError, match=r"not healthy after 1 s: loading"):
        server.start()
    assert time.perf_counter() - begin < 15
    server.log_path.unlink()


def test_children_of_the_server_are_ended_too(tmp_path):
    (tmp_path / "parent.py").write_text(
        "import subprocess, sys, fake_sglang\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal, time\\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\\ntime.sleep(60)'])\n"
        "fake_sglang.main()\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    with Server("m", env={"PYTHONPATH": path}, module="parent") as server:
        pgid = server._process.pid
        time.sleep(0.3)  # the child must have installed its handler
    deadline = time.perf_counter() + 5  # init reaps the orphan
    while group_exists(pgid) and time.perf_counter() < deadline:
        time.sleep(0.05)
    assert not group_exists(pgid)


def test_paused_server_answers_only_after_it_goes_on():
    with fake() as server, server.client() as client:
        server.pause()
        with server.running():
            assert client.generate([1], max_new_tokens=1).completion_tokens == 1
        with server.client(timeout=0.5) as hasty, pytest.raises(Exception, match="timed out"):
            hasty.generate([1], max_new_tokens=1)
        # leaving the block stops a paused server as well


def test_pool_balance():
    with fake() as server:
        assert server.pool_balanced()
        assert server.internal_state()["memory_usage"]["token_capacity"] == 4096
    with fake(FAKE_USED="3") as server:
        assert server.pool_problem(timeout=0.3) == "3 slots in use and 0 requests after 0 s"


def test_a_server_that_died_is_not_balanced():
    with fake() as server:
        server._process.kill()
        server._process.wait()
        assert "stopped" in server.pool_problem()


def test_a_server_that_dies_under_a_request_says_why():
    server = fake(FAKE_DIE="KV pool is on fire")
    with pytest.raises(ServerError, match=r"server broke off \(\w+\): RuntimeError: KV pool is on fire"), server:
        server.client().generate([1], max_new_tokens=4)
    server.log_path.unlink()


def test_a_port_in_use_is_not_taken(monkeypatch):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        choices = [other.getsockname()[1], free_port()]
        tried = iter(choices)
        monkeypatch.setattr(secrets, "choice", lambda _: next(tried))
        assert free_port() == choices[1]
