"""How much arithmetic a training step needs, and how much a GPU could do: the two sides of MFU.

What is counted is what the loss needs, as eagle3/ttt.py computes it: rows that count at no step give their first keys
and values only. A trainer that computes every row would need more for the same loss, so this MFU is the lower one.
"""

import re
from collections.abc import Sequence

import torch

from eagle3.draft import DraftConfig

PEAK_TFLOPS = {  # dense bfloat16 with fp32 accumulation, from NVIDIA's datasheets; a name's first match counts
    r"A100": 312.0,
    r"H100 PCIe": 756.0,
    r"H100 NVL|H200 NVL": 835.0,
    r"H100|H200": 989.0,
    r"B200": 2250.0,
    r"RTX PRO 6000 Blackwell (Server|Workstation) Edition": 503.8,
}


def peak_flops(device_name: str) -> float | None:
    """Operations a second that a GPU of this name could do at most; None where it is not known."""
    found = (peak for name, peak in PEAK_TFLOPS.items() if re.search(rf"\b({name})\b", device_name))
    return next((peak * 1e12 for peak in found), None)


def device_peak(device: torch.device) -> float | None:
    """`peak_flops` of a device; None of a CPU."""
    return peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def training_flops(config: DraftConfig, depth: torch.Tensor, offsets: Sequence[int], train_head: bool) -> float:
    """Operations of a forward and backward pass over packed samples, two for each multiply-add.

    `depth` int64 [T]: at how many steps each row counts (`ttt.supervised_depth`); `offsets`: the samples' first rows
    and then T. Backward takes twice the forward, less the gradients that frozen inputs and heads do not need.
    """
    hidden, qkv = config.hidden_size, config.q_size + 2 * config.kv_size
    tokens, first, rows = len(depth), int((depth > 0).sum()), int(depth.sum())  # rows: summed over the steps
    starts = torch.tensor(offsets[:-1], dtype=torch.int64).repeat_interleave(torch.tensor(offsets).diff())
    seen = depth * (torch.arange(tokens) - starts + 1) + depth * (depth - 1) // 2  # keys, summed over a row's steps
    frozen_inputs = tokens * hidden * (3 * hidden + qkv)  # fc, and the embedding half of q, k, v
    layer = tokens * hidden * 2 * config.kv_size + first * hidden * config.q_size + (rows - first) * hidden * qkv
    layer += rows * hidden * (config.q_size + 3 * config.intermediate_size)
    head, teacher = rows * hidden * config.draft_vocab_size, first * hidden * config.draft_vocab_size
    attention = 2 * config.q_size * int(seen.sum())
    return float(4 * frozen_inputs + 6 * layer + 6 * attention + (6 if train_head else 4) * head + 2 * teacher)
