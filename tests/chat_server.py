"""An HTTP server with the chat part of the OpenAI API, for faults that a real server has only on a bad day."""

import json
import threading
import time
from collections.abc import Callable
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


class ChatServer:
    """Serves `reply(request)`, each answer after `delay` seconds, and keeps the requests. Use as a context manager."""

    def __init__(self, reply: Callable[[dict], Reply], delay: float = 0.0) -> None:
        self.requests: list[dict] = []
        self.most_at_a_time = self.under_way = 0
        lock, outer = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.send(200, {"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": 512}]})

            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    outer.requests.append(request)
                    outer.under_way += 1
                    outer.most_at_a_time = max(outer.most_at_a_time, outer.under_way)
                time.sleep(delay)
                with lock:
                    outer.under_way -= 1
                self.send(*reply(request))

            def send(self, status: int, content: dict) -> None:
                body = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
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
