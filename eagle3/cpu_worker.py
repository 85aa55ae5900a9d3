"""vLLM's CPU worker for speculative decoding of an MLA target (DeepSeek, Kimi) with a Llama draft.

The MLA backend wants cache blocks of 16 tokens; the CPU attention of the draft has a kernel for blocks of 16 but
advertises multiples of 32 only, so vLLM finds "No common block size". Nothing of this is needed on a GPU.
"""

from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.worker.cpu_worker import CPUWorker


def _block_sizes(kv_cache_spec: object = None) -> list[MultipleOf]:
    return [MultipleOf(16)]


CPUAttentionBackend.get_supported_kernel_block_sizes = staticmethod(_block_sizes)


class DraftWorker(CPUWorker):
    """The platform's worker; importing this module has changed what its attention advertises."""
