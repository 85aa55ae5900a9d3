"""A headless Chromium, spoken to by its DevTools protocol: open a page, look at it, note what it complains of."""

import base64
import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from websockets.sync.client import connect

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--no-first-run", "about:blank")


class Page:
    """A tab. `events`: what the browser told so far, (method, parameters)."""

    def __init__(self, socket):
        self.socket, self.events, self.count = socket, [], 0
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        self.count += 1
        self.socket.send(json.dumps({"id": self.count, "method": method, "params": parameters}))
        while True:
            message = json.loads(self.socket.recv(timeout=60))
            if message.get("id") == self.count:
                assert "error" not in message, message
                return message["result"]
            self.events.append((message["method"], message["params"]))

    def open(self, path: Path, *, width: int, dark: bool) -> None:
        """Load a file as a window of this width would show it."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while self.evaluate("document.readyState") != "complete":
            time.sleep(0.05)

    def evaluate(self, expression: str):
        """The value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """The whole page, not only the window."""
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        path.write_bytes(base64.b64decode(picture["data"]))

    def complaints(self) -> list[str]:
        """Console messages, errors and exceptions since the page was opened."""
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(parameters) for method, parameters in self.events if method in kinds]

    def requests(self) -> list[str]:
        """The addresses that the page asked for, itself and what it holds in itself left out."""
        asked = [p["request"]["url"] for method, p in self.events if method == "Network.requestWillBeSent"]
        return [url for url in asked[1:] if not url.startswith("data:")]


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """Chromium with its profile in `folder`, ended with the block."""
    process = subprocess.Popen(
        ["chromium", *FLAGS[:-1], f"--user-data-dir={folder}", FLAGS[-1]],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        port_file = folder / "DevToolsActivePort"
        for _ in range(600):
            if port_file.is_file() and port_file.read_text().count("\n"):
                break
            assert process.poll() is None, "chromium ended"
            time.sleep(0.1)
        port = port_file.read_text().splitlines()[0]
        with connect(f"ws://127.0.0.1:{port}{_tab(port)}", max_size=None) as socket:
            yield Page(socket)
    finally:
        process.terminate()
        process.wait(timeout=20)


def _tab(port: str) -> str:
    """The address of the tab that is open."""
    from urllib.request import urlopen

    with urlopen(f"http://127.0.0.1:{port}/json", timeout=20) as answer:
        tab = next(t for t in json.load(answer) if t["type"] == "page")
    return tab["webSocketDebuggerUrl"].split(port, 1)[1]
