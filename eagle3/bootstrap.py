"""How sure a measured mean is: bootstrap over prompts.

The prompts of a benchmark are a sample of what could be asked, so they are what is drawn again: each resample takes as
many prompts of each benchmark as there are, with replacement, sums their columns and forms the figure from the sums (an
acceptance length is a ratio of sums, not a mean of ratios). The interval is the middle 95% of the figures: the
percentile bootstrap of Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13. Two drafts are
compared on the same draws (paired, as in Koehn, Statistical Significance Tests for Machine Translation Evaluation,
2004), so that prompts on which both do well cancel out. The draws are the same in every run.
"""

from collections.abc import Sequence

import numpy as np

RESAMPLES, BLOCK = 4000, 1000  # BLOCK resamples at a time: their counts take BLOCK x prompts numbers
PERCENTILES = (2.5, 97.5)
SEED = 0

Interval = list[float]


def resampled_sums(strata: Sequence[np.ndarray]) -> np.ndarray:
    """Sums over resampled prompts. `strata`: [prompts, columns] for each benchmark; returns [RESAMPLES, columns]."""
    random = np.random.default_rng(SEED)
    return sum((_sums_of(rows, random) for rows in strata if len(rows)), np.zeros(()))


def _sums_of(rows: np.ndarray, random: np.random.Generator) -> np.ndarray:
    num_prompts = len(rows)
    shares = np.full(num_prompts, 1 / num_prompts)
    blocks = [random.multinomial(num_prompts, shares, BLOCK) @ rows for _ in range(RESAMPLES // BLOCK)]
    return np.concatenate(blocks)


def interval(figures: np.ndarray) -> Interval:
    """The middle 95% of resampled figures [RESAMPLES]."""
    return np.percentile(figures, PERCENTILES).tolist()


def ratio_interval(strata: Sequence[np.ndarray], plus: float = 0.0) -> Interval | None:
    """The interval of plus + sum of the first column / sum of the second; None for a single prompt, or nothing to sum.

    An acceptance length is plus 1 of (accepted tokens, passes that checked drafts).
    """
    if sum(map(len, strata)) < 2:
        return None
    sums = resampled_sums(strata)
    return interval(plus + sums[:, 0] / sums[:, 1]) if (sums[:, 1] > 0).all() else None


def compared(strata: Sequence[np.ndarray]) -> tuple[Interval, Interval] | None:
    """Intervals of the difference and of the ratio of two acceptance lengths, the second one's to the first one's.

    Columns: accepted tokens and passes of the first draft, then of the second, a prompt a row.
    """
    if sum(map(len, strata)) < 2:
        return None
    sums = resampled_sums(strata)
    if not (sums[:, [1, 3]] > 0).all():
        return None
    first, second = 1 + sums[:, 0] / sums[:, 1], 1 + sums[:, 2] / sums[:, 3]
    return interval(second - first), interval(second / first)
