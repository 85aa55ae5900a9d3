"""The GPUs as their driver sees them, read through NVML: torch is not touched, so nothing is allocated on them."""

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

GIB = 1 << 30


@dataclass(frozen=True)
class Process:
    """A process that holds memory of a GPU; `used` bytes is None where the driver does not say."""

    pid: int
    name: str
    used: int | None

    def __str__(self) -> str:
        used = "unknown" if self.used is None else f"{self.used / GIB:.1f} GiB"
        return f"process {self.pid} ({self.name}, {used})"


@dataclass(frozen=True)
class Gpu:
    """One GPU: memory in bytes, compute capability (major, minor)."""

    index: int
    name: str
    free: int
    total: int
    capability: tuple[int, int]
    processes: list[Process]


@dataclass(frozen=True)
class Machine:
    """The GPUs that this process may use, in its order, and the newest CUDA that the driver runs, e.g. (13, 0)."""

    gpus: list[Gpu]
    driver: str
    driver_cuda: tuple[int, int]


def read_machine(nvml: Any, visible: str | None = None) -> Machine:
    """`nvml`: the module pynvml, or what stands in for it; `visible`: CUDA_VISIBLE_DEVICES. ValueError if it fails."""
    try:
        nvml.nvmlInit()
    except Exception as error:  # NVMLError has a class for each fault
        raise ValueError(f"the NVIDIA driver does not answer: {error}") from None
    try:
        handles = _visible_handles(nvml, visible)
        cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
        gpus = [_read_gpu(nvml, handle) for handle in handles]
        return Machine(gpus, str(nvml.nvmlSystemGetDriverVersion()), (cuda // 1000, cuda % 1000 // 10))
    finally:
        nvml.nvmlShutdown()


def _visible_handles(nvml: Any, visible: str | None) -> list[Any]:
    if visible is None:
        return [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return [
        nvml.nvmlDeviceGetHandleByIndex(int(n)) if n.isdigit() else nvml.nvmlDeviceGetHandleByUUID(n) for n in names
    ]


def _read_gpu(nvml: Any, handle: Any) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    processes = [
        Process(p.pid, _process_name(p.pid), p.usedGpuMemory) for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    ]
    capability = tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle))
    name = str(nvml.nvmlDeviceGetName(handle))
    return Gpu(nvml.nvmlDeviceGetIndex(handle), name, memory.free, memory.total, capability, processes)


def _process_name(pid: int) -> str:
    import psutil

    with suppress(psutil.Error):
        return " ".join(psutil.Process(pid).cmdline())[:60] or psutil.Process(pid).name()
    return "not visible from here, perhaps in another container"


def check_memory(machine: Machine, tp_size: int, share: float, weight_bytes: int) -> str:
    """What is free; ValueError if a rank would not get `share` of its GPU, or the weights do not fit into that."""
    gpus = machine.gpus[:tp_size]
    if len(gpus) < tp_size:
        raise ValueError(f"--tp-size {tp_size}: only {len(gpus)} GPUs are visible (CUDA_VISIBLE_DEVICES, nvidia-smi)")
    for gpu in gpus:
        if gpu.free < share * gpu.total:
            holders = ", ".join(map(str, gpu.processes)) or "no process that the driver names"
            raise ValueError(
                f"GPU {gpu.index}: {gpu.free / GIB:.1f} of {gpu.total / GIB:.1f} GiB are free, "
                f"--gpu-memory-utilization {share} needs {share * gpu.total / GIB:.1f}; held by {holders}"
            )
        if weight_bytes / tp_size > share * gpu.total:
            raise ValueError(
                f"GPU {gpu.index}: {weight_bytes / tp_size / GIB:.0f} GiB of weights a rank do not fit into "
                f"{share * gpu.total / GIB:.0f} GiB (--gpu-memory-utilization {share} of {gpu.total / GIB:.0f}); "
                f"raise --tp-size {tp_size}"
            )
    least = min(gpus, key=lambda g: g.free)
    return (
        f"{len(gpus)} x {gpus[0].name}, at least {least.free / GIB:.1f} of {least.total / GIB:.1f} GiB free; weights "
        f"{weight_bytes / tp_size / GIB:.1f} GiB a rank"
    )


def check_driver(machine: Machine, torch_cuda: str | None) -> str:
    """Driver and torch's CUDA; ValueError if the driver is of an older CUDA generation than torch was built for."""
    if torch_cuda is None:
        raise ValueError("torch was built without CUDA, but vLLM is not the CPU build; reinstall torch")
    driver = ".".join(map(str, machine.driver_cuda))
    if machine.driver_cuda[0] < int(torch_cuda.split(".")[0]):
        raise ValueError(
            f"the driver ({machine.driver}) runs CUDA up to {driver}, torch was built for {torch_cuda}: update the "
            "driver, or install torch and vLLM for an older CUDA"
        )
    return f"driver {machine.driver} runs CUDA {driver}, torch is built for {torch_cuda}"


def attention_backend(capability: tuple[int, int], mla: bool) -> str:
    """What vLLM chooses first for this GPU, after _get_backend_priorities in vllm/platforms/cuda.py (0.32)."""
    if os.environ.get("VLLM_ATTENTION_BACKEND"):
        return f"{os.environ['VLLM_ATTENTION_BACKEND']} (from VLLM_ATTENTION_BACKEND)"
    major = capability[0]
    if not mla:
        return "FLASHINFER" if major == 10 else "FLASH_ATTN" if major >= 8 else "TRITON_ATTN"
    if major == 12:
        return "TRITON_MLA, the only dense MLA kernel for SM120"
    return {9: "FLASH_ATTN_MLA", 10: "FLASHINFER_MLA"}.get(major, "TRITON_MLA")
