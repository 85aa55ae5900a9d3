"""An HTTP server with the chat part of the OpenAI API, for faults that a real server has only on a bad day."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Reply = tuple[int, dict]


def completion(text: str, *, token_ids=None, finish_reason="stop", **more) -> Reply:
    """A good reply; `more` goes into the message."""
    choice = {"index": 0, "finish_reason": finish_reason, "message": {"role": "assistant", "content": text, **more}}
    choice |= {"token_ids": token_ids} if token_ids is not None else {}
    usage = {"prompt_tokens": 1, "completion_tokens": len(token_ids or text.split()), "total_tokens": 1}
    return 200, {
        "id": "c",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [choice],
        "usage": usage,
    }


def chunks(completion: dict) -> Iterator[bytes]:
    """The completion as a stream of events, a token a chunk, prompt ids in the first, usage in the last."""
    (choice,) = completion["choices"]
    shared = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": completion["model"]}
    prompt_ids = {"prompt_token_ids": completion.get("prompt_token_ids")}
    for token in choice["token_ids"]:
        piece = {"index": 0, "delta": {"content": "x"}, "finish_reason": None, "token_ids": [token]}
        yield b"data: " + json.dumps(shared | prompt_ids | {"choices": [piece]}).encode() + b"\n\n"
        prompt_ids = {}
    last = {"choices": [], "usage": completion["usage"], "metrics": completion.get("metrics")}
    yield b"data: " + json.dumps(shared | last).encode() + b"\n\ndata: [DONE]\n\n"


class ChatServer:
    """Serves `reply(request)`, each answer after `delay` seconds, and keeps the requests. Use as a context manager.

    Streams where a request asks for it. `metrics`: what /metrics says. `model`: the name that it serves.
    """

    def __init__(
        self,
        reply: Callable[[dict], Reply],
        delay: float = 0.0,
        metrics: Callable[[], str] | None = None,
        model: str = "m",
    ) -> None:
        self.requests: list[dict] = []
        self.most_at_a_time = self.under_way = 0
        self.delay = delay
        lock, outer = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if self.path == "/metrics":
                    status, text = (200, metrics()) if metrics else (404, "")
                    self.send_bytes(status, "text/plain", text.encode())
                else:
                    self.send(200, {"object": "list", "data": [{"id": model, "object": "model", "max_model_len": 512}]})

            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    outer.requests.append(request)
                    outer.under_way += 1
                    outer.most_at_a_time = max(outer.most_at_a_time, outer.under_way)
                time.sleep(outer.delay)
                with lock:
                    outer.under_way -= 1
                status, content = reply(request)
                if status == 200 and request.get("stream"):
                    self.send_bytes(200, "text/event-stream", b"".join(chunks(content)))
                else:
                    self.send(status, content)

            def send(self, status: int, content: dict) -> None:
                self.send_bytes(status, "application/json", json.dumps(content).encode())

            def send_bytes(self, status: int, kind: str, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"

    def __enter__(self) -> "ChatServer":
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.http.server_close()
