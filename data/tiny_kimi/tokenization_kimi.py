"""Tokenizer of the tiny Kimi: tiktoken behind the slow Transformers interface, as the large one has it.

Like the tokenizer of Kimi-K2.5 it is no fast tokenizer, it has no offsets, its class is remote code (`auto_map` in
tokenizer_config.json), single tokens may end inside a character, and its special tokens take the ids right after the
mergeable ranks: named ones where `added_tokens_decoder` names them, `<|reserved_token_N|>` elsewhere. Its `encode`
looks at every character in Python, to cut runs that are too long for tiktoken.
"""

import os
import shutil
from collections.abc import Iterator
from typing import Any

import tiktoken
from tiktoken.load import load_tiktoken_bpe
from transformers import PreTrainedTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
NUM_RESERVED_SPECIAL_TOKENS = 64
MAX_CHARS, MAX_RUN = 400_000, 25_000  # that tiktoken is given at a time; of them without a change to or from whitespace
BYTE_TO_CHAR = bytes_to_unicode()
CHAR_TO_BYTE = {char: byte for byte, char in BYTE_TO_CHAR.items()}


class TikTokenTokenizer(PreTrainedTokenizer):
    """Byte-level BPE over `tiktoken.model`. Tokens as text spell each byte as one printable character."""

    vocab_files_names = {"vocab_file": "tiktoken.model"}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, vocab_file: str, added_tokens_decoder: dict[int, Any] | None = None, **kwargs: Any) -> None:
        ranks = load_tiktoken_bpe(vocab_file)
        added = {int(i): str(token) for i, token in (added_tokens_decoder or {}).items()}
        ids = range(len(ranks), len(ranks) + NUM_RESERVED_SPECIAL_TOKENS)
        self.vocab_file = vocab_file
        self.special_tokens = {added.get(i, f"<|reserved_token_{i}|>"): i for i in ids}
        self.model = tiktoken.Encoding(
            "tiny_kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=self.special_tokens
        )
        self.decoder = [_spell(self.model.decode_single_token_bytes(i)) for i in range(self.model.n_vocab)]
        self.encoder = {token: i for i, token in enumerate(self.decoder)}
        super().__init__(added_tokens_decoder=added_tokens_decoder or {}, **kwargs)

    @property
    def vocab_size(self) -> int:
        return self.model.n_vocab

    def get_vocab(self) -> dict[str, int]:
        return dict(self.encoder)

    def encode(self, text: str, allow_special_tokens: bool = True, **kwargs: Any) -> list[int]:
        """Token ids of `text`; with allow_special_tokens=False the text of a control token stays plain text."""
        if kwargs:
            return super().encode(text, **kwargs)
        how = {"allowed_special": "all"} if allow_special_tokens else {"disallowed_special": ()}
        return [i for piece in _pieces(text) for i in self.model.encode(piece, **how)]

    def decode(self, token_ids: int | list[int], **kwargs: Any) -> str:
        if kwargs:
            return super().decode(token_ids, **kwargs)
        return self.model.decode([token_ids] if isinstance(token_ids, int) else list(token_ids))

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return [self.decoder[i] for i in self.encode(text)]

    def _convert_token_to_id(self, token: str) -> int:
        return self.encoder.get(token, self.encoder[str(self.unk_token)])

    def _convert_id_to_token(self, index: int) -> str:
        return self.decoder[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return bytes(CHAR_TO_BYTE[char] for char in "".join(tokens)).decode("utf-8", "replace")

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str]:
        path = os.path.join(save_directory, (filename_prefix + "-" if filename_prefix else "") + "tiktoken.model")
        if os.path.abspath(path) != os.path.abspath(self.vocab_file):
            shutil.copyfile(self.vocab_file, path)
        return (path,)

    def apply_chat_template(self, conversation: list, tools: list | None = None, **kwargs: Any) -> Any:
        return super().apply_chat_template(conversation, tools=_sorted_keys(tools), **kwargs)


def _pieces(text: str) -> Iterator[str]:
    """The text, cut every MAX_CHARS characters and in each run of more than MAX_RUN, so that tiktoken can take it."""
    for at in range(0, len(text), MAX_CHARS):
        yield from _without_long_runs(text[at : at + MAX_CHARS])


def _without_long_runs(text: str) -> Iterator[str]:
    start = length = 0
    in_space = False
    for i, char in enumerate(text):
        length, in_space = (length + 1 if char.isspace() == in_space else 1), char.isspace()
        if length > MAX_RUN:
            yield text[start:i]
            start, length = i, 1
    yield text[start:]


def _spell(token: bytes) -> str:
    return "".join(BYTE_TO_CHAR[byte] for byte in token)


def _sorted_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted_keys(value[key]) for key in sorted(value)}
    return [_sorted_keys(item) for item in value] if isinstance(value, list) else value
