"""Token sequences as text whose every token keeps what is known of it: supervised, or drafted and accepted."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

Decode = Callable[[list[int]], str]
UNFINISHED = "\ufffd"  # what a decoder writes for a part of a character


@dataclass(frozen=True)
class Piece:
    """Text of as few tokens as make whole characters: tokens `first` to `last` of the sequence."""

    text: str
    first: int
    last: int
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Pass:
    """What one pass of the target added to an answer: `accepted` drafted tokens, then one of its own, in `pieces`.

    `rejected` is None for the pass over the prompt, which checks no draft.
    """

    pieces: list[tuple[Piece, bool]]  # and whether it was drafted and accepted
    accepted: int
    rejected: int | None


def pieces(ids: Sequence[int], decode: Decode) -> list[Piece]:
    """The text of token ids, piece by piece.

    Each token is decoded after the ones of the piece before, since the first token of a text loses its space in some
    tokenizers.
    """
    found: list[Piece] = []
    before: list[int] = []
    pending: list[int] = []
    for position, token in enumerate(ids):
        pending.append(token)
        text = decode(before + pending)[len(decode(before)) :]
        if not text.endswith(UNFINISHED) or position == len(ids) - 1:
            found.append(Piece(text, position - len(pending) + 1, position, tuple(pending)))
            before, pending = pending, []
    return found


def passes(ids: Sequence[int], accepted: Sequence[int], num_drafts: int, decode: Decode) -> Iterator[Pass]:
    """An answer's tokens by the pass of the target that gave them; a piece goes with its last token.

    The first token comes from the prompt's pass. A pass that accepted a tokens of `num_drafts` adds a + 1, the last one
    as many as the answer still takes.
    """
    made = pieces(ids, decode)
    starts = [0]
    for number in (0, *accepted):
        starts.append(min(starts[-1] + number + 1, len(ids)))
    for k, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
        number = accepted[k - 1] if k else 0
        here = [(p, p.last - start < number) for p in made if start <= p.last < end]
        if here:
            yield Pass(here, number, num_drafts - number if k else None)
