"""A vLLM worker for tests: runs compressed-tensors INT4 experts on any CPU by dequantising them at load.

vLLM's INT4 expert kernel for CPU needs AMX. Here the experts become float32 weights of vLLM's ordinary CPU experts, so
everything but the kernel is the real thing. `worker_cls="tests.int4_worker.Int4Worker"`.
"""

import torch
from vllm.model_executor.layers.fused_moe.oracle.int_wna16 import WNA16MoEBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_wna16 as wna16,
)
from vllm.v1.worker.cpu_worker import CPUWorker

from custom_worker import HiddenStatesWorker

PACKED = ("weight_packed", "weight_scale", "weight_shape")


def dequantize(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Weights [experts, out, in] of codes [experts, out, in / 8], eight an int32, and scales [experts, out, groups]."""
    codes = (packed[..., None] >> torch.arange(0, 32, 4, dtype=torch.int32) & 15) - 8
    return (codes.flatten(-2).unflatten(-1, (scale.shape[-1], -1)) * scale[..., None]).flatten(-2)


def use_dequantized_experts(self: object, layer: torch.nn.Module) -> None:
    """In place of the INT4 method's process_weights_after_loading."""
    for name in ("w13", "w2"):
        weight = dequantize(getattr(layer, f"{name}_weight_packed"), getattr(layer, f"{name}_weight_scale"))
        for part in PACKED:
            delattr(layer, f"{name}_{part}")
        setattr(layer, f"{name}_weight", torch.nn.Parameter(weight, requires_grad=False))
    method = UnquantizedFusedMoEMethod(self.moe)
    method.process_weights_after_loading(layer)
    layer._replace_quant_method(method)


class Dequantize:
    """Replaces the INT4 experts' method in the worker's process before the target is loaded."""

    def load_model(self, *args: object, **kwargs: object) -> object:
        wna16.select_wna16_moe_backend = lambda **_: (WNA16MoEBackend.CPU, None)
        wna16.CompressedTensorsWNA16MoEMethod.process_weights_after_loading = use_dequantized_experts
        return super().load_model(*args, **kwargs)


class Int4Worker(Dequantize, CPUWorker):
    """vLLM's own CPU worker."""


class Int4Capture(Dequantize, HiddenStatesWorker):
    """The worker that captures hidden states."""
