"""Writes small hidden-states folders, as 02_extract_hidden_states.py leaves them, for the tests of the training."""

import json
from pathlib import Path

import numpy as np
import torch

from eagle3 import files, layers, shards
from eagle3.shards import ShardContent, ShardFormat, ShardWriter, dtype_name
from eagle3.target import Target
from eagle3.vocab import DraftVocab


def random_samples(lengths, num_layers, hidden_size, vocab_size, seed=0):
    """`(ids, mask, states)` for each length: random, the first third of each sample a prompt."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randint(vocab_size, (n,), generator=generator).numpy(),
            (np.arange(n) >= n // 3).astype(np.uint8),
            torch.randn(n, num_layers, hidden_size, generator=generator),
        )
        for n in lengths
    ]


def write_shards(folder, samples, *, dtype=torch.float32, per_shard=3, shared=None, names=None):
    """Samples `names`, or "s0", "s1", ..., in shards of `per_shard`; returns the number of shards."""
    names = names or [f"s{i}" for i in range(len(samples))]
    folder.mkdir(parents=True, exist_ok=True)
    form = ShardFormat(samples[0][2].shape[1], samples[0][2].shape[2], dtype, shared or {})
    groups = [range(i, min(i + per_shard, len(samples))) for i in range(0, len(samples), per_shard)]
    for number, group in enumerate(groups):
        ids, masks, states = zip(*(samples[i] for i in group), strict=True)
        content = ShardContent(
            index=number,
            sample_ids=[names[i] for i in group],
            offsets=np.cumsum([0, *map(len, ids)]),
            input_ids=np.concatenate(ids).astype(np.int32),
            loss_mask=np.concatenate(masks),
        )
        writer = ShardWriter(folder, content, form)
        for place, sample in enumerate(states):
            fp8 = dtype == torch.float8_e4m3fn
            stored, scale = shards.quantise_fp8(sample) if fp8 else (sample.to(dtype), None)
            writer.write(place, 0, stored, scale)
        writer.finish()
    return len(groups)


def write_hidden_states(
    folder: Path, of: Target, samples, layer_ids, vocab: DraftVocab, dtype=torch.float32, part=None, **changes
) -> Path:
    """A whole folder of target `of`, or `part` (i, n) of it: every n-th sample from the i-th on.

    `changes` replace entries of the metadata that the shards share.
    """
    index, count = part or (1, 1)
    names = [f"s{i}" for i in range(len(samples))][index - 1 :: count]
    samples = samples[index - 1 :: count]
    shared = {
        "layer_ids": layer_ids,
        "layer_convention": layers.CONVENTION,
        "storage_dtype": dtype_name(dtype),
        "engine_dtype": "float32",
        "target": of.fingerprint,
        "versions": {"torch": torch.__version__},
    } | changes
    num_shards = write_shards(folder, samples, dtype=dtype, shared=shared, names=names)
    metadata = {
        "format": shards.FORMAT,
        "shared": shared,
        "settings": {"data_sha256": "0" * 64, "part": f"{index}/{count}" if part else None},
        "prepared": {},
        "num_samples": len(samples),
        "num_tokens": sum(len(ids) for ids, _, _ in samples),
        "num_shards": num_shards,
    }
    files.write_json(folder / shards.METADATA, metadata)
    vocab.save(folder)
    return folder


def flip_a_byte(shard, tensor):
    """Damage the middle of a tensor of a shard's file."""
    content = bytearray(shard.read_bytes())
    header = int.from_bytes(content[:8], "little")
    first, end = json.loads(content[8 : 8 + header])[tensor]["data_offsets"]
    content[8 + header + (first + end) // 2] ^= 1
    shard.write_bytes(content)


def model_samples(model_path: Path, layer_ids, count=12, seed=0):
    """Samples that the target itself continues greedily, with its own states at `layer_ids` (pre-norm)."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    outputs: dict[int, torch.Tensor] = {}
    for i in layer_ids:
        model.model.layers[i].register_forward_hook(lambda _m, _a, out, i=i: outputs.update({i: out[0]}))
    rng = np.random.default_rng(seed)
    samples = []
    for n in rng.integers(6, 14, count):
        prompt = torch.from_numpy(rng.integers(0, 300, (1, int(n))))
        with torch.no_grad():
            ids = model.generate(prompt, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
            model(ids)
        states = torch.stack([outputs[i].reshape(ids.shape[1], -1) for i in layer_ids], 1)
        samples.append((ids[0].numpy(), (np.arange(ids.shape[1]) >= n).astype(np.uint8), states))
    return samples
