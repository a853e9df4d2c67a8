"""One SGLang server as a context manager.

``Server`` runs ``python -m sglang.launch_server`` in a process group of its own, waits until
``/health`` answers, and on the way out ends exactly that group. A launch that fails raises
``StartError`` with the sentence the server itself gave (see ``log``), and keeps the log file; a connection
that breaks inside the ``with`` block leaves it as ``ServerError`` in the same way.

The log goes to a file, never to a pipe: an unread pipe would stop the server once it is full.
Nothing is decided here about threads, devices or algorithms: ``args`` and ``env`` are passed on as they
are. ``pause`` and ``resume`` stop and continue the whole group, so that a benchmark can keep several
servers loaded while only one of them uses the processor (an idle SGLang scheduler polls all the time).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from sglang_trunc.serving import log as server_log
from sglang_trunc.serving.client import Client

START_TIMEOUT = 900.0  # a large checkpoint read from a cold disk on a GPU-less machine
STOP_TIMEOUT = 20.0
POLL_SECONDS = 0.2
# Otherwise each /health call generates a token and sleeps a second.
QUIET_HEALTH = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}


class ServerError(RuntimeError):
    """The server stopped or did not answer; the message carries its own explanation."""


class StartError(ServerError):
    """The server did not become healthy."""


# Below the ports that Linux and others give to outgoing connections: one of those may be taken between the probe and
# the server's own bind, many seconds later.
_PORTS = range(20000, 32000)


def free_port(host: str = "127.0.0.1") -> int:
    while True:
        port = secrets.choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port


def _wait_unreaped(process: subprocess.Popen[bytes], timeout: float) -> None:
    """Wait for the exit of the group's leader without reaping it."""
    deadline = time.perf_counter() + timeout
    options = os.WEXITED | os.WNOWAIT | os.WNOHANG
    with contextlib.suppress(ChildProcessError):  # reaped already, by poll()
        while os.waitid(os.P_PID, process.pid, options) is None and time.perf_counter() < deadline:
            time.sleep(0.05)


@dataclass
class Server:
    """``with Server(model, ["--speculative-algorithm", "trunc"]) as server: server.client()...``"""

    model_path: str
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    name: str = "server"
    log_path: Path | None = None
    host: str = "127.0.0.1"
    port: int = 0  # 0: any free port
    start_timeout: float = START_TIMEOUT
    module: str = "sglang.launch_server"
    start_seconds: float | None = field(default=None, init=False)
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False, repr=False)
    _owns_log: bool = field(default=False, init=False, repr=False)

    def __enter__(self) -> Self:
        return self if self._process is not None else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(keep_log=error is not None)
        if isinstance(error, httpx.TransportError):
            what = f"{self.name} broke off ({type(error).__name__})"
            raise ServerError(f"{what}: {self._explain()}") from error

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def command(self) -> list[str]:
        head = [sys.executable, "-m", self.module, "--model-path", str(self.model_path)]
        return [*head, "--host", self.host, "--port", str(self.port), *self.args]

    def start(self) -> Self:
        if self._process is not None:
            raise RuntimeError(f"{self.name} is already running")
        self.port = self.port or free_port(self.host)
        if self.log_path is None:
            handle, path = tempfile.mkstemp(prefix=f"sglang-trunc-{self.name}-", suffix=".log")
            os.close(handle)
            self.log_path, self._owns_log = Path(path), True
        begin = time.perf_counter()
        with self.log_path.open("wb") as sink:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, **QUIET_HEALTH, **self.env},
                start_new_session=True,
            )
        try:
            self._wait_until_healthy(begin)
        except BaseException:
            self.stop(keep_log=True)
            raise
        self.start_seconds = time.perf_counter() - begin
        return self

    def _wait_until_healthy(self, begin: float) -> None:
        assert self._process is not None
        with httpx.Client(timeout=10.0, trust_env=False) as http:
            while True:
                if (code := self._process.poll()) is not None:
                    raise StartError(f"{self.name} stopped with exit code {code}: {self._explain()}")
                with contextlib.suppress(httpx.TransportError):
                    if http.get(f"{self.url}/health").status_code == 200:
                        return
                if time.perf_counter() - begin > self.start_timeout:
                    raise StartError(f"{self.name} was not healthy after {self.start_timeout:.0f} s: {self._explain()}")
                time.sleep(POLL_SECONDS)

    def _explain(self) -> str:
        return f"{server_log.failure_sentence(self.log())}\n(full log: {self.log_path})"

    def stop(self, keep_log: bool = False) -> None:
        """End the server's own process group; safe to call twice."""
        process, self._process = self._process, None
        if process is None:
            return
        self._signal(process, signal.SIGCONT)
        # Only the launcher is asked to end: it takes its children down. One that sees them die of the same
        # signal reports a crash and sits five seconds over its diagnostics.
        process.terminate()
        _wait_unreaped(process, STOP_TIMEOUT)
        # The leader is still a zombie here, so the group's id cannot belong to anybody else.
        self._signal(process, signal.SIGKILL)
        process.wait()
        if self._owns_log and not keep_log and self.log_path is not None:
            self.log_path.unlink(missing_ok=True)
            self.log_path, self._owns_log = None, False

    @staticmethod
    def _signal(process: subprocess.Popen[bytes], signum: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signum)

    def pause(self) -> None:
        """Freeze every process of the group; requests wait until :meth:`resume`."""
        assert self._process is not None, f"{self.name} is not running"
        self._signal(self._process, signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None, f"{self.name} is not running"
        self._signal(self._process, signal.SIGCONT)

    @contextlib.contextmanager
    def running(self) -> Iterator[Self]:
        """Let a paused server run for the length of a ``with`` block."""
        self.resume()
        try:
            yield self
        finally:
            self.pause()

    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path and self.log_path.exists() else ""

    def log_tail(self, lines: int = 20) -> str:
        return "\n".join(self.log().splitlines()[-lines:])

    def client(self, timeout: float = 600.0) -> Client:
        return Client(self.url, timeout=timeout)

    def info(self) -> dict[str, Any]:
        """``/server_info``: resolved arguments, ``max_total_num_tokens``, ``internal_states``."""
        with self.client() as client:
            return client.server_info()

    def internal_state(self) -> dict[str, Any]:
        """First scheduler's state: ``memory_usage``, ``last_gen_throughput``, ``avg_spec_accept_length``."""
        states: list[dict[str, Any]] = self.info()["internal_states"]
        return states[0]

    def load(self) -> dict[str, Any]:
        """``/v1/loads`` of the first scheduler: ``num_used_tokens`` counts neither free nor cached slots."""
        with self.client() as client:
            return client.loads()[0]

    def pool_problem(self, timeout: float = 10.0) -> str | None:
        """Why the KV pool is out of balance now that no request runs; None when it is balanced.

        ``num_used_tokens`` is capacity minus free minus evictable slots, so an idle server without a
        leak reports 0. SGLang also checks this and its request rows on every idle turn, and by default
        stops the server when they do not add up.
        """
        deadline = time.perf_counter() + timeout
        while True:
            if not self.is_alive():
                return f"the server stopped: {self._explain()}"
            load = self.load()
            busy = load["num_running_reqs"] + load["num_waiting_reqs"]
            if not busy and load["num_used_tokens"] == 0:
                break
            if time.perf_counter() > deadline:
                return f"{load['num_used_tokens']} slots in use and {busy} requests after {timeout:.0f} s"
            time.sleep(POLL_SECONDS)
        reported = server_log.leaks(self.log())
        return reported[0] if reported else None

    def pool_balanced(self, timeout: float = 10.0) -> bool:
        return self.pool_problem(timeout) is None
