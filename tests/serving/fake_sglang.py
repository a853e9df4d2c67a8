"""A stand-in for SGLang's HTTP server, for tests of whatever talks to one. Standard library only.

Its "model" is a hash: the logits after a prefix of token ids are a pure function of that prefix, so plain
decoding is reproducible and a speculative server on the same "weights" agrees with it, save where a test
asks for trouble. Runs in a thread (``FakeSGLang``) or as ``python -m fake_sglang --port N ...``, which takes
any flag that ``sglang.launch_server`` takes and is configured by ``FAKE_*`` variables:

FAKE_SWAP       "I:G,...": after a prefix of I tokens the two best are G nats apart, and a speculative
                server takes the second
FAKE_BLOCK      tokens per streamed event of a speculative server (default 3)
FAKE_DELAY      seconds per event
FAKE_EOS        token id that ends an answer unless ignore_eos (default 0)
FAKE_FAIL       exit at start with this sentence as a ValueError
FAKE_DIE        stop with this sentence as a RuntimeError at the first request
FAKE_USED       num_used_tokens reported by /v1/loads
FAKE_ANSWER_AT  length of the prefix after which the end token is the best one
FAKE_REFUSE     a speculative server answers HTTP 400 to requests with this option, and names it
FAKE_REFUSE_PLAIN  the same of a plain server
FAKE_OPTIONS    JSON: options of the algorithm that a speculative server reports
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import pickle
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

VOCABULARY = 64
BEST_LOGIT = 20.0  # one BF16 ulp is 0.125 here


@dataclass
class Model:
    """Logits of a prefix; ``swaps`` maps a prefix length to the gap between its two best tokens."""

    swaps: dict[int, float] = field(default_factory=dict)
    answer_at: int | None = None
    eos: int = 0

    def logits(self, prefix: list[int]) -> list[float]:
        digest = hashlib.sha256(json.dumps(prefix).encode()).digest()
        values = [-(digest[i % 32] / 64) - i / 1000 for i in range(VOCABULARY)]
        best = self.eos if len(prefix) == self.answer_at else 1 + digest[0] % (VOCABULARY - 2)
        values[best] = BEST_LOGIT
        values[best + 1] = BEST_LOGIT - self.swaps.get(len(prefix), 5.0)
        return values

    def choose(self, prefix: list[int], speculative: bool, values: list[float] | None = None) -> int:
        """``values``: logits in the place of the prefix's own."""
        values = values or self.logits(prefix)
        ranked = sorted(range(VOCABULARY), key=lambda token: -values[token])
        return ranked[1 if speculative and len(prefix) in self.swaps else 0]


def log_softmax(values: list[float]) -> list[float]:
    top = max(values)
    normaliser = top + math.log(sum(math.exp(v - top) for v in values))
    return [v - normaliser for v in values]


@dataclass
class Settings:
    model: Model = field(default_factory=Model)
    speculative: bool = False
    block: int = 3
    delay: float = 0.0
    used: int = 0
    fail_flush: bool = False
    refused: str | None = None  # an option
    options: dict = field(default_factory=dict)
    requests: list[dict] = field(default_factory=list)
    info: dict = field(default_factory=dict)


class Handler(BaseHTTPRequestHandler):
    settings: Settings
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def _reply(self, body: object, status: int = 200) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if path in ("/health", "/health_generate"):
            return self._reply("")
        if path in ("/model_info", "/get_model_info"):
            return self._reply({"model_path": "fake", "model_type": "ouro"})
        if path == "/server_info":
            state = {"memory_usage": {"kvcache": 0.5, "token_capacity": 4096}}
            if self.settings.options:
                state["sglang_trunc"] = {"options": self.settings.options}
            return self._reply({"device": "cpu", "internal_states": [state], **self.settings.info})
        if path == "/v1/loads":
            load = {"num_running_reqs": 0, "num_waiting_reqs": 0, "num_used_tokens": self.settings.used}
            return self._reply({"loads": [load]})
        return self._reply({"detail": "Not Found"}, 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        path = self.path.split("?")[0]
        if path == "/flush_cache":
            failed = self.settings.fail_flush
            return self._reply("Flush cache failed." if failed else "Cache flushed.", 400 if failed else 200)
        if path == "/v1/tokenize":
            return self._reply({"tokens": [byte % VOCABULARY for byte in body["prompt"].encode()]})
        if path == "/abort_request":
            return self._reply("")
        if path == "/generate" and (sentence := os.environ.get("FAKE_DIE")):
            print(f"Traceback (most recent call last):\nRuntimeError: {sentence}", flush=True)
            os._exit(1)
        if path == "/generate":
            self.settings.requests.append(body)
            return self._generate(body)
        return self._reply({"detail": "Not Found"}, 404)

    def _generate(self, body: dict) -> None:
        params = body["sampling_params"]
        refused = self.settings.refused
        if refused is not None and (refused in params or refused in body):
            sentence = f"{refused} is refused."
            return self._reply({"error": {"message": sentence, "type": "BadRequest", "code": 400}}, 400)
        ids = body.get("input_ids") or [byte % VOCABULARY for byte in body["text"].encode()]
        decodes = [Decode(self.settings, body, ids) for _ in range(params.get("n", 1))]
        if not body.get("stream"):
            answers = [list(decode.events())[-1] for decode in decodes]
            return self._reply(answers if len(answers) > 1 else answers[0])
        events = ({**event, "index": index} for index, decode in enumerate(decodes) for event in decode.events())
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for event in events:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True


class Decode:
    """One request: events with cumulative ids, as SGLang streams them."""

    def __init__(self, settings: Settings, body: dict, ids: list[int]) -> None:
        self.settings, self.body, self.ids = settings, body, ids
        self.out: list[int] = []
        self.tops: list = []
        self.chosen: list = []

    def events(self):
        params, settings = self.body["sampling_params"], self.settings
        wanted = params["max_new_tokens"]
        stops = {settings.model.eos} | set(params.get("stop_token_ids") or ())
        finish, rounds = None, 0
        while finish is None:
            step = settings.block if settings.speculative and self.out else 1
            rounds += bool(self.out)
            for _ in range(step):
                self._one()
                if self.out[-1] in stops and not params.get("ignore_eos"):
                    finish = {"type": "stop", "matched": self.out[-1]}
                elif len(self.out) == wanted:
                    finish = {"type": "length", "length": wanted}
                if finish:
                    break
            time.sleep(settings.delay)
            yield self._event(finish, rounds)

    def _one(self) -> None:
        model, prefix = self.settings.model, self.ids + self.out
        logits = model.logits(prefix)
        if processor := self.body.get("custom_logit_processor"):
            name = bytes.fromhex(json.loads(processor)["callable"])
            rows = Rows([logits])
            request = SimpleNamespace(origin_input_ids=self.ids, output_ids=self.out)
            pickle.loads(name)()(rows, [{**self.body["sampling_params"]["custom_params"], "__req__": request}])
            logits = rows.values[0]
        self.out.append(model.choose(prefix, self.settings.speculative, logits))
        values = log_softmax(logits)
        ranked = sorted(range(VOCABULARY), key=lambda t: -values[t])
        self.tops.append([[values[t], t, None] for t in ranked[: self.body.get("top_logprobs_num", 0)]])
        self.chosen.append([[values[t], t, None] for t in self.body.get("token_ids_logprob") or ()])

    def _event(self, finish: dict | None, rounds: int) -> dict:
        meta = {
            "prompt_tokens": len(self.ids),
            "completion_tokens": len(self.out),
            "cached_tokens": 0,
            "finish_reason": finish,
        }
        if self.settings.speculative and rounds:
            meta |= {"spec_verify_ct": rounds, "spec_accept_length": len(self.out) / rounds}
        if self.body.get("return_logprob"):
            meta |= {"output_top_logprobs": self.tops, "output_token_ids_logprobs": self.chosen}
        text = "".join(chr(97 + token % 26) for token in self.out)
        return {"text": text, "output_ids": list(self.out), "meta_info": meta}


class Rows:
    """Just enough of a tensor for ``logits[row, token] = 0`` and ``logits[row] = -inf``."""

    def __init__(self, values: list[list[float]]) -> None:
        self.values = values

    def __setitem__(self, index: tuple[int, int] | int, value: float) -> None:
        if isinstance(index, int):
            self.values[index] = [value] * VOCABULARY
        else:
            self.values[index[0]][index[1]] = value


class FakeSGLang:
    """The server in a thread of the test's own process."""

    def __init__(self, settings: Settings | None = None, port: int = 0) -> None:
        self.settings = settings or Settings()
        handler = type("BoundHandler", (Handler,), {"settings": self.settings})
        self.http = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"

    def __enter__(self) -> FakeSGLang:
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.http.server_close()


def from_environment(speculative: bool) -> Settings:
    env = os.environ
    pairs = [entry.split(":") for entry in env.get("FAKE_SWAP", "").split(",") if entry]
    answer = env.get("FAKE_ANSWER_AT")
    model = Model({int(i): float(g) for i, g in pairs}, int(answer) if answer else None, int(env.get("FAKE_EOS", 0)))
    return Settings(
        model=model,
        speculative=speculative,
        block=int(env.get("FAKE_BLOCK", 3)),
        delay=float(env.get("FAKE_DELAY", 0)),
        used=int(env.get("FAKE_USED", 0)),
        refused=env.get("FAKE_REFUSE" if speculative else "FAKE_REFUSE_PLAIN"),
        options=json.loads(env.get("FAKE_OPTIONS", "{}")) if speculative else {},
        info={"device": env.get("FAKE_DEVICE", "cpu"), "speculative_num_draft_tokens": 4},
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--speculative-algorithm")
    known, _ = parser.parse_known_args()
    if sentence := os.environ.get("FAKE_FAIL"):
        raise ValueError(sentence)
    FakeSGLang(from_environment(bool(known.speculative_algorithm)), known.port).http.serve_forever(0.05)


if __name__ == "__main__":
    main()
