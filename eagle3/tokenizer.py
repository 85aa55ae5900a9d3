"""The target's tokenizer: of the class that its folder declares, and giving back what it is given."""

import re
import unicodedata
from collections.abc import Callable, Iterable
from typing import Any

from eagle3.target import Target

HARD_TEXT = "Grüße <think>你好</think> 🤷🏽‍♀️ 司马 é\n\n\n  x\t'll 1234567 \n"
# Characters, all of them whitespace or none, and characters in all, on whose number an encoding is shown not to depend.
LONGEST_RUN, LONGEST_TEXT = 20_000, 100_000
WORDS = "x" + " the" * (LONGEST_TEXT // 4)  # each one token, so that no cut is between two both here and one further
LONG = ("a" * LONGEST_RUN, " " * LONGEST_RUN, WORDS[:-1], WORDS[1:])
GENERIC_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")


def load_tokenizer(target: Target, trust_remote_code: bool) -> Any:
    """The tokenizer of the class that tokenizer_config.json declares. ValueError if another one would be loaded.

    Transformers 5 converts a remote slow tokenizer into a fast one of its own when it may not run the remote code,
    and then says nothing of it; its ids can differ.
    """
    from transformers import AutoTokenizer

    config = target.tokenizer_config
    remote = (config.get("auto_map") or {}).get("AutoTokenizer")
    remote = [remote] if isinstance(remote, str) else [name for name in remote or [] if name]
    if remote and not trust_remote_code:
        raise ValueError(
            f"{target.path}: its tokenizer is Python code of its own ({remote[0]}); add --trust-remote-code"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            target.path, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:
        raise ValueError(f"{target.path}: its tokenizer cannot be loaded: {type(error).__name__}: {error}") from error
    expected = {name.rsplit(".", 1)[-1] for name in remote} or _builtin_names(target)
    if expected and (found := type(tokenizer).__name__) not in expected:
        raise ValueError(
            f"{target.path}: expected the tokenizer class {' or '.join(sorted(expected))}, found {found}: Transformers "
            "replaced it, and its token ids may differ from those that the target was trained on"
        )
    return tokenizer


def _builtin_names(target: Target) -> set[str]:
    """The class names under which Transformers may load a declared class of its own; empty if none is declared."""
    declared = target.tokenizer_config.get("tokenizer_class")
    if not declared:
        return set()
    stem = declared.removesuffix("Fast")
    serialised = (target.path / "tokenizer.json").is_file()  # that file is the tokenizer, whatever its class is called
    return {stem, f"{stem}Fast", *(GENERIC_CLASSES if serialised else ())}


def check_tokenizer(
    target: Target, tokenizer: Any, encode: Callable[[str], list[int]], control_tokens: dict[str, int]
) -> None:
    """ValueError when a hard text does not come back, a control token is not one id, or an id has no embedding."""
    ids = encode(HARD_TEXT)
    name = type(tokenizer).__name__
    if not same_text(decode(tokenizer, ids), HARD_TEXT):
        raise ValueError(f"{target.path}: {name} does not give back {HARD_TEXT!r} but {decode(tokenizer, ids)!r}")
    for token, expected in control_tokens.items():
        if (found := encode(token)) != [expected]:
            raise ValueError(f"{target.path}: {name} encodes {token} as {found}, expected [{expected}]")
    highest = max((*ids, *control_tokens.values(), *tokenizer.all_special_ids))
    if highest >= target.vocab_size:
        raise ValueError(
            f"{target.path}: token id {highest} of {name}, but config.json has vocab_size {target.vocab_size}"
        )


def encoder(tokenizer: Any, control_tokens: Iterable[str]) -> Callable[[str], list[int]]:
    """The quickest function that gives the ids of `tokenizer(text, add_special_tokens=False)`, as probes show."""

    def whole(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]  # no word of its length

    def bare(text: str) -> list[int]:
        return tokenizer.encode(text)

    def backend(text: str) -> list[int]:
        return tokenizer.backend_tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    tokens = [*map(str, tokenizer.added_tokens_decoder.values()), *control_tokens]
    probes = (HARD_TEXT + "".join(tokens), *LONG)
    quick = [backend] if tokenizer.is_fast else [_direct(tokenizer), bare] if is_tiktoken(tokenizer) else [bare]
    return next((encode for encode in quick if all(encode(t) == whole(t) for t in probes)), whole)


def known_ids(tokenizer: Any) -> list[int]:
    """The ids of all tokens, ascending. A class's own `get_vocab`, as Kimi's, may leave added ones out."""
    return sorted({*tokenizer.get_vocab().values(), *tokenizer.added_tokens_decoder})


def decoder(tokenizer: Any) -> Callable[[list[int]], str]:
    """The quickest function that gives `decode(tokenizer, ids)`, as probes of every token show.

    tiktoken takes a twentieth of the time: Transformers goes from token to token in Python.
    """

    def whole(ids: list[int]) -> str:
        return decode(tokenizer, ids)

    if not is_tiktoken(tokenizer):
        return whole
    probes = (known_ids(tokenizer), tokenizer(" x", add_special_tokens=False)["input_ids"])
    try:
        same = all(tokenizer.model.decode(probe) == whole(probe) for probe in probes)
    except LookupError:  # a token that was added beside tiktoken
        same = False
    return tokenizer.model.decode if same else whole


def _direct(tokenizer: Any) -> Callable[[str], list[int]]:
    """Straight to tiktoken, cut at special tokens: it would copy the set of them, some hundred, in each call."""
    model = tokenizer.model
    special = {token: [model.encode_single_token(token)] for token in model.special_tokens_set}
    cuts = [re.compile(f"({pattern.pattern})") for pattern in quick_patterns(special)]

    def direct(text: str) -> list[int]:
        if not _is_short(text):
            return tokenizer.encode(text)
        pieces = [text]
        for cut in cuts:
            pieces = [part for piece in pieces for part in cut.split(piece)]
        ids: list[int] = []
        for piece in pieces:
            ids += special.get(piece) or model.encode_ordinary(piece)
        return ids

    return direct


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern of any of the texts, the longest first."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")


def quick_patterns(tokens: Iterable[str]) -> list[re.Pattern[str]]:
    """Patterns that together find what `any_of` does: one a first character, searched ten times as fast.

    One for all of them where they could overlap, since then their order decides.
    """
    tokens = list(tokens)
    firsts = sorted({token[0] for token in tokens})
    if any(first in token[1:] for first in firsts for token in tokens):
        return [any_of(tokens)]
    return [any_of(token for token in tokens if token[0] == first) for first in firsts]


def _is_short(text: str) -> bool:
    """Whether neither the text nor a run in it is too long: a run that is would fill a block of half its length."""
    block = LONGEST_RUN // 2
    starts = range(0, len(text) - block + 1, block)
    words = (text[start : start + block].split(maxsplit=1) for start in starts)
    return len(text) <= LONGEST_RUN or (len(text) <= LONGEST_TEXT and all(w and len(w[0]) < block for w in words))


def is_tiktoken(tokenizer: Any) -> bool:
    """Whether a slow tokenizer keeps its tiktoken encoding as `model`, as Kimi's does.

    Kimi's own `encode` looks at each character in Python before it, for runs that would be too long for tiktoken.
    """
    return type(getattr(tokenizer, "model", None)).__module__.startswith("tiktoken")


def decode(tokenizer: Any, ids: list[int]) -> str:
    """The text of ids, special tokens included."""
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def same_text(one: str, other: str) -> bool:
    """Equal but for Unicode composition, which the normalisers of some tokenizers change."""
    return unicodedata.normalize("NFC", one) == unicodedata.normalize("NFC", other)
