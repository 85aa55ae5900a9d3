"""What an evaluation measures: each benchmark put through one setup, answer by answer; and its form in the JSON."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

Json = dict[str, Any]


@dataclass
class Answer:
    """What came for one prompt.

    `ids`: the generated tokens. `accepted`: how many drafted tokens each pass of the target accepted that checked a
    draft; None where that is not known for a single prompt. `first_token_s` and `last_token_s`: when its first and its
    last token came, in seconds after it was sent.
    """

    id: str
    category: str | None
    ids: list[int] = field(default_factory=list)
    accepted: list[int] | None = None
    first_token_s: float = 0.0
    last_token_s: float = 0.0

    @property
    def ms_per_token(self) -> float | None:
        """Time per output token after the first one, in ms: (last - first) / (tokens - 1); None for a single token."""
        gaps = len(self.ids) - 1
        return 1000 * (self.last_token_s - self.first_token_s) / gaps if gaps > 0 else None


@dataclass(frozen=True)
class Pass:
    """One benchmark through one setup. `counters`: vLLM's own of this pass; empty without a draft.

    They are drafts (passes that checked one), draft_tokens, accepted_tokens and accepted_tokens_per_pos (a list).
    """

    answers: list[Answer]
    seconds: float
    counters: Json

    @property
    def tokens(self) -> int:
        return sum(len(a.ids) for a in self.answers)


@dataclass(frozen=True)
class Setup:
    """What is measured. `num_drafts` 0: the target alone. `draft`: its folder, `sha256` the hashes of its files, both
    None where a server has it; `url`: that server's."""

    num_drafts: int
    concurrency: int
    draft: str | None = None
    sha256: dict[str, str] | None = None
    url: str | None = None

    @property
    def is_plain(self) -> bool:
        return self.num_drafts == 0

    @property
    def key(self) -> tuple:
        """What two measurements of one thing agree in: the draft's files, wherever they are."""
        return tuple((self.sha256 or {}).values()), self.num_drafts, self.concurrency


@dataclass(frozen=True)
class Measurement:
    """Every benchmark through one setup."""

    setup: Setup
    passes: dict[str, Pass]


def as_json(measurement: Measurement) -> Json:
    """Setup, and seconds and counters of each benchmark: all but the answers."""
    setup = measurement.setup
    return {
        "draft": setup.draft,
        "draft_sha256": setup.sha256,
        "url": setup.url,
        "num_speculative_tokens": setup.num_drafts,
        "concurrency": setup.concurrency,
        "passes": {name: {"seconds": p.seconds, "counters": p.counters} for name, p in measurement.passes.items()},
    }


def answers_as_json(number: int, measurement: Measurement) -> Iterable[Json]:
    """The answers of the measurement of this number, with what tells where they belong."""
    for name, measured in measurement.passes.items():
        for answer in measured.answers:
            fields = asdict(answer)
            yield {
                "measurement": number,
                "benchmark": name,
                "id": fields.pop("id"),
                "category": fields.pop("category"),
                "tokens": fields.pop("ids"),
                **fields,
            }


def from_json(content: Json) -> list[Measurement]:
    """The measurements of an evaluation's JSON."""
    answers: dict[tuple[int, str], list[Answer]] = {}
    for a in content["answers"]:
        answer = Answer(a["id"], a["category"], a["tokens"], a["accepted"], a["first_token_s"], a["last_token_s"])
        answers.setdefault((a["measurement"], a["benchmark"]), []).append(answer)
    return [
        Measurement(
            Setup(m["num_speculative_tokens"], m["concurrency"], m["draft"], m["draft_sha256"], m["url"]),
            {name: Pass(answers[number, name], p["seconds"], p["counters"]) for name, p in m["passes"].items()},
        )
        for number, m in enumerate(content["measurements"])
    ]
