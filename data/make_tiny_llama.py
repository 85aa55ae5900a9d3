"""Build a tiny Llama with random weights, a fast byte-level BPE tokenizer and a ChatML template.

    python data/make_tiny_llama.py data/targets/tiny_llama

For what the tiny Kimi cannot show on CPU: chunked prefill, prefix caching and speculative decoding without MLA.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.common import directory_size, new_directory, run_builder, train_bpe
from eagle3.files import write_json

VOCAB_SIZE = 512
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_ID = VOCAB_SIZE - 1  # <|im_end|>: special tokens come after the trained ones
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tokenizer(folder: Path) -> None:
    """The tokenizer's files, chat template included."""
    from transformers import PreTrainedTokenizerFast

    backend = train_bpe(VOCAB_SIZE - len(SPECIAL_TOKENS), PATTERN)
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHATML,
        model_max_length=2048,
    )
    tokenizer.save_pretrained(folder)


def write_model(folder: Path, seed: int) -> None:
    """config.json and float32 weights. initializer_range 0.2 keeps greedy decoding from repeating one token."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        initializer_range=0.2,
        bos_token_id=EOS_ID - 2,
        eos_token_id=EOS_ID,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        for name, tensor in model.named_parameters():
            if name.endswith("norm.weight"):
                tensor.uniform_(0.5, 1.5)  # gains of 1 would hide code that forgets them
        model.save_pretrained(folder)


def make_tiny_llama(out_dir: Path | str, *, seed: int = 0) -> Path:
    """Write a tiny Llama to the new folder `out_dir` and return it. Raises ValueError if `out_dir` exists."""
    with new_directory(Path(out_dir)) as folder:
        write_model(folder, seed)
        write_tokenizer(folder)
        write_json(folder / "generation_config.json", {"eos_token_id": EOS_ID})
    return Path(out_dir)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights (default: 0)")

    def build(args: argparse.Namespace) -> str:
        path = make_tiny_llama(args.out_dir, seed=args.seed)
        return f"{path}: 6 layers, {VOCAB_SIZE} tokens, {directory_size(path) / 1e6:.1f} MB"

    run_builder(parser, build)


if __name__ == "__main__":
    main()
