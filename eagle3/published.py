"""Acceptance lengths that others have published for their drafts: what is possible, for comparison."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """`length` on one benchmark with chains of 3 drafted tokens; `to`: the end of a range over several benchmarks."""

    draft: str
    benchmark: str
    length: float
    to: float | None = None

    @property
    def text(self) -> str:
        return f"{self.length:.3f}" if self.to is None else f"{self.length:.2f}–{self.to:.2f}"


KIMI_K25 = "lightseek kimi-k2.5-eagle3"
KIMI_K2 = "AQ-MedAI, for Kimi-K2-Instruct"
LLAMA = "speculators, for Llama-3.1-8B (508k samples)"
PUBLISHED = (
    Published(KIMI_K25, "MT-Bench", 2.687),
    Published(KIMI_K25, "GSM8K", 3.201),
    Published(KIMI_K25, "HumanEval", 3.285),
    Published(KIMI_K25, "MATH500", 3.342),
    Published(KIMI_K2, "HumanEval", 3.372),
    Published(KIMI_K2, "GSM8K", 3.165),
    Published(KIMI_K2, "MATH500", 3.490),
    Published(LLAMA, "several", 2.82, 3.02),
)
NAMES = {"mt_bench": "MT-Bench", "gsm8k": "GSM8K", "humaneval": "HumanEval", "math500": "MATH500"}  # by file name
