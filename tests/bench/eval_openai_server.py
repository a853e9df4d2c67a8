"""A stand-in for an OpenAI-compatible server: streams words, counts tokens as it is told to. Standard library only."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class OpenAI:
    """``words`` are sent two tokens an event."""

    words: tuple[str, ...] = (" It", " is", " 42", ".")
    running_counts: bool = True
    usage: bool = True
    status: int = 200
    requests: list[tuple[str, dict]] = field(default_factory=list)

    def __enter__(self) -> OpenAI:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                found = self.path == "/v1/models"
                self.send_response(200 if found else 404)
                self.end_headers()
                self.wfile.write(json.dumps({"data": [{"id": "some-model"}]}).encode() if found else b"{}")

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append((self.path, body))
                self.send_response(outer.status)
                self.end_headers()
                if outer.status != 200:
                    self.wfile.write(b'{"error": "too long"}')
                    return
                for event in outer.events("chat" in self.path):
                    self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                self.wfile.write(b"data: [DONE]\n\n")

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def events(self, chat: bool):
        count = 0
        for word in self.words:
            count += 2
            choice = {"delta": {"content": word}} if chat else {"text": word}
            usage = {"prompt_tokens": 5, "completion_tokens": count} if self.running_counts else None
            yield {"choices": [{**choice, "finish_reason": None}], "usage": usage}
        end = {"delta": {}} if chat else {"text": ""}
        yield {"choices": [{**end, "finish_reason": "stop"}], "usage": None}
        if self.usage:
            yield {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": count}}
