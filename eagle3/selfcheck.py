"""Proof that the captured states are the target's own, made in the worker for every sample while it runs.

For each sample whose prompt ends in a step, on its last row:
- norm(h_last) equals the final hidden row that the model itself made its logits from, within the dtype's tolerance;
- the token that the target sampled greedily has, in lm_head(norm(h_last)), a logit within two ulps of the largest
  (ties happen in bf16), and is exactly the largest in at least 99% of the samples.
For every row: all values are finite. In the first step, which runs eagerly, each captured layer equals what a hook on
that very decoder layer saw; a compiled target computes that step a second time, compiled, with the same result.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

NORM_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-3}  # relative to the row's largest value
COMPILED_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}  # relative, of half the rows
TIE_ULPS = 2
MIN_EXACT = 0.99
EXACT_SAMPLES = 100  # the exact share is judged once it rests on this many samples: one tie in four is no fault


@dataclass
class Tally:
    """What the check has seen so far."""

    samples: int = 0
    exact: int = 0
    worst_norm_error: float = 0.0
    worst_gap_ulps: float = 0.0
    faults: list[str] = field(default_factory=list)

    def line(self) -> str:
        """One line for the log."""
        return (
            f"self-check: {self.samples:,} samples, sampled token = largest logit in {self.exact:,}, "
            f"worst gap {self.worst_gap_ulps:.1f} ulp, worst final-norm error {self.worst_norm_error:.1e}"
        )


def compare(
    tally: Tally,
    names: list[str],
    recomputed: torch.Tensor,
    final_rows: torch.Tensor,
    logits: torch.Tensor | None,
    sampled: list[int],
) -> None:
    """Judge the samples `names`, whose prompts have ended, and add them to the tally.

    recomputed: norm(h_last) [n, H]; final_rows: the model's own [n, H]; logits: lm_head(recomputed) [n, V], None on a
    rank that has none; sampled: the target's greedy tokens.
    """
    tolerance = NORM_TOLERANCE[final_rows.dtype]
    largest = final_rows.float().abs().amax(-1)
    errors = ((recomputed.float() - final_rows.float()).abs().amax(-1) / largest).tolist()
    gaps = [0.0] * len(names) if logits is None else _gaps_in_ulps(logits, sampled)
    for name, error, gap in zip(names, errors, gaps, strict=True):
        tally.samples += 1
        tally.exact += gap == 0
        tally.worst_norm_error = max(tally.worst_norm_error, error)
        tally.worst_gap_ulps = max(tally.worst_gap_ulps, gap)
        if not error <= tolerance:  # a NaN fails too
            tally.faults.append(
                f"sample {name!r}: the last captured layer, normed, differs from the target's final hidden row by "
                f"{error:.1e} of its largest value (allowed {tolerance:.0e}): it is not the last layer's output"
            )
        elif not gap <= TIE_ULPS:
            tally.faults.append(
                f"sample {name!r}: the token that the target sampled is {gap:.1f} ulp below the largest logit of the "
                f"captured last layer (allowed {TIE_ULPS})"
            )
    if tally.samples >= EXACT_SAMPLES and tally.exact < MIN_EXACT * tally.samples:
        tally.faults.append(
            f"the sampled token has the largest logit in only {tally.exact} of {tally.samples} samples "
            f"(at least {MIN_EXACT:.0%} expected)"
        )


def _gaps_in_ulps(logits: torch.Tensor, sampled: list[int]) -> list[float]:
    """How far each sampled token's logit lies below the largest, in ulps of the largest."""
    largest = logits.amax(-1)
    own = logits.gather(-1, torch.tensor(sampled, device=logits.device)[:, None])[:, 0]
    exponent = torch.floor(torch.log2(largest.float().abs().clamp_min(torch.finfo(torch.float32).tiny)))
    ulp = torch.exp2(exponent) * torch.finfo(logits.dtype).eps
    return ((largest.float() - own.float()) / ulp).tolist()


class LayerWitness:
    """Hooks on the decoder layers themselves: an independent view of what each layer put out in the last step.

    A compiled graph does not call hooks, so a compiled decoder (`compiled`) is made to run its next step eagerly, then
    compiled as well, and what the two give is compared. Make it after vLLM's warm-up, or the hooks would be compiled.
    """

    def __init__(self, decoder: Any, layer_ids: list[int], *, compiled: bool) -> None:
        self._decoder, self._layer_ids = decoder, layer_ids
        self._seen: dict[int, torch.Tensor] = {}
        self._differences: list[float] = []  # by layer, compiled from eager
        self._handles = [decoder.layers[i].register_forward_hook(self._hook(i)) for i in layer_ids]
        if compiled:
            decoder.do_not_compile = True  # as vLLM's support_torch_compile reads it at each call
            decoder.forward = self._both_ways

    def _both_ways(self, *args: Any, **kwargs: Any) -> Any:
        """The decoder's result as it is without compilation, compared with the compiled one. Runs once."""
        decoder = self._decoder
        del decoder.forward
        # a copy: the first layer's residual is the embeddings it was given, and is added to in place
        eager = decoder.forward(*map(_copied, args), **{name: _copied(value) for name, value in kwargs.items()})
        decoder.do_not_compile = False
        compiled = decoder(*args, **kwargs)
        pairs = zip(eager[1], compiled[1], strict=True)
        self._differences = [relative_difference(ours, theirs) for ours, theirs in pairs]
        return eager

    def _hook(self, layer_id: int):  # noqa: ANN202
        def hook(_module: torch.nn.Module, _inputs: tuple, output: tuple[torch.Tensor, torch.Tensor]) -> None:
            hidden, residual = output
            self._seen[layer_id] = hidden + residual

        return hook

    def faults(self, captured: list[torch.Tensor]) -> list[str]:
        """Compare with the captured states, one tensor [rows, H] a layer; one line for each that differs."""
        if len(captured) != len(self._layer_ids):
            return [f"the target returned {len(captured)} layers, {len(self._layer_ids)} were asked for"]
        tolerance = COMPILED_TOLERANCE[captured[0].dtype]
        return [
            f"layer {i}: what was captured is not what decoder layer {i} put out"
            for i, states in zip(self._layer_ids, captured, strict=True)
            if i not in self._seen or not torch.equal(self._seen[i][: len(states)], states)
        ] + [
            f"layer {i}: the compiled target gives states that differ from the eager one's by {difference:.1e} in half "
            f"of the rows (allowed {tolerance:.0e}); run without --compile"
            for i, difference in zip(self._layer_ids, self._differences, strict=False)
            if not difference <= tolerance
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._seen.clear()


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def relative_difference(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Median over the rows of |found - expected| / |expected|, both [rows, H]: a row that a router sent elsewhere after
    a near tie does not count, a wrong layer does."""
    expected, found = expected.float(), found[: len(expected)].float()
    return ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).median().item()
