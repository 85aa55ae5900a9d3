"""One training step of a draft, ours and speculators 0.9.0's, in one run, from the same weights and the same batch.

    python bench/train_step.py                              # Kimi-K2.5's draft on a GPU, 4 samples of 2,048 tokens
    python bench/train_step.py --supervised 1.0 0.7 0.3     # shares of each sample that are answer, one after another
    python bench/train_step.py --full-vocab --samples 1     # all 163,840 tokens
    python bench/train_step.py --preset smollm2 --samples 2 --length 512      # on a CPU

A step is forward, backward, clipping to norm 1, fused AdamW; the head and the embedding are frozen, the loss is KL.
First each side scores the batch row by row: the largest difference of a row's KL at any step, over the rows that both
supervise, is printed and must be small. Then each runs `--repeats` steps in a row, after 3 to warm up.
speculators computes every row whatever the share, so it runs for the first share only.
Peak memory is what the allocator handed out meanwhile. TFLOP/s counts the arithmetic that each side really does.

Needs speculators 0.9.0 (`--ours-only` does without). Weights, states and ids are random.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    import sys

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import eagle3.ttt
from eagle3.batches import PackedBatch
from eagle3.cli import positive_int
from eagle3.draft import NORM_FLAGS, Draft, DraftConfig, Teacher
from eagle3.flops import training_flops
from eagle3.ttt import supervised_counts, supervised_depth, training_loss

KIMI = {"hidden_size": 7168, "intermediate_size": 12288, "num_heads": 64, "num_kv_heads": 64, "head_dim": 128}
SMOLLM2 = {"hidden_size": 576, "intermediate_size": 1536, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
PRESETS = {
    "kimi": (KIMI, 163_840, 32_000),
    "smollm2": (SMOLLM2, 49_152, 49_152),
    "tiny": (TINY, 500, 100),
}
KL_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
DECAY = 0.8
WARM_UP = 3


@dataclass(frozen=True)
class Case:
    """What is measured. `supervised`: the share of each sample, at its end, that is answer."""

    config: DraftConfig
    samples: int
    length: int
    steps: int
    supervised: float
    device: torch.device
    dtype: torch.dtype

    @property
    def tokens(self) -> int:
        return self.samples * self.length


# --- what both sides share -----------------------------------------------------------------------------------------


def draft_and_teacher(case: Case) -> tuple[Draft, Teacher]:
    """The same random weights at every call."""
    torch.manual_seed(0)
    config, options = case.config, {"device": case.device, "dtype": case.dtype}
    embedding = torch.empty(config.target_vocab_size, config.hidden_size, **options).normal_(std=0.02)
    head = torch.empty(config.draft_vocab_size, config.hidden_size, **options).normal_(std=0.02)
    draft = Draft.create(config, embedding, head, compute_dtype=case.dtype)
    return draft, Teacher(torch.ones(config.hidden_size, device=case.device), config.norm_eps, head)


def random_batch(case: Case, seed: int) -> PackedBatch:
    """Packed samples of random states and ids whose first part is the prompt."""
    generator = torch.Generator(case.device).manual_seed(seed)
    shape = (case.tokens, 4, case.config.hidden_size)
    states = torch.randn(shape, device=case.device, dtype=case.dtype, generator=generator)
    vocabulary = case.config.target_vocab_size
    ids = torch.randint(vocabulary, (case.tokens,), device=case.device, generator=generator)
    position = torch.arange(case.tokens, device=case.device) % case.length
    mask = position >= round((1 - case.supervised) * case.length)
    return PackedBatch(ids, states, mask.cpu(), list(range(0, case.tokens + 1, case.length)))


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


# --- ours ----------------------------------------------------------------------------------------------------------


def our_step(case: Case, draft: Draft, teacher: Teacher) -> Callable[[PackedBatch], None]:
    optimizer = optimizer_of(draft)
    decay = DECAY ** torch.arange(case.steps, device=case.device)

    def step(batch: PackedBatch) -> None:
        counts = supervised_counts(batch.loss_mask, batch.offsets, case.steps).clamp_min(1)
        train(draft, optimizer, training_loss(draft, teacher, batch, decay / counts.to(case.device)).loss)

    return step


def our_rows(case: Case, draft: Draft, teacher: Teacher, batch: PackedBatch) -> torch.Tensor:
    """The KL of every packed row at every step [T, steps] on the CPU; NaN where it does not count."""
    found = torch.full((case.tokens, case.steps), float("nan"))
    depth = supervised_depth(batch.loss_mask, batch.offsets, case.steps).cpu()
    original, losses = eagle3.ttt.head_loss, []

    def recording(*args: Any) -> tuple:
        result = original(*args)
        losses.append(result[1].cpu()[(args[3] >= 0).cpu()])
        return result

    eagle3.ttt.head_loss = recording
    try:
        with torch.no_grad():
            training_loss(draft, teacher, batch, torch.ones(case.steps, device=case.device))
    finally:
        eagle3.ttt.head_loss = original
    for step, values in enumerate(losses):
        found[depth > step, step] = values.float()
    return found


def our_flops(case: Case) -> float:
    """Floating-point operations of a step; all batches of a case have one mask."""
    batch = random_batch(case, 0)
    depth = supervised_depth(batch.loss_mask, batch.offsets, case.steps)
    return training_flops(case.config, depth, batch.offsets, train_head=False)


# --- speculators ---------------------------------------------------------------------------------------------------


def peer_model(draft: Draft, teacher: Teacher, attention: str) -> torch.nn.Module:
    """speculators' own Eagle3DraftModel, fp32 as it trains, with the draft's and the teacher's weights."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    c = draft.config
    layer = LlamaConfig(
        hidden_size=c.hidden_size, intermediate_size=c.intermediate_size, num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads, head_dim=c.head_dim, num_hidden_layers=1, rms_norm_eps=c.norm_eps,
        vocab_size=c.target_vocab_size, max_position_embeddings=c.max_positions, rope_parameters=dict(c.rope),
    )  # fmt: skip
    layer._attn_implementation = attention
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=c.draft_vocab_size,
        **{flag: getattr(c, flag) for flag in NORM_FLAGS},
        eagle_aux_hidden_state_layer_ids=[3, 31, 59],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )
    with torch.device(draft.fc.weight.device):
        model = Eagle3DraftModel(config)
    if model.t2d is not None:
        model.t2d[: c.draft_vocab_size] = True
    own = dict(model.named_parameters())
    ours = dict(draft.named_parameters())
    ours |= {"verifier_norm.weight": teacher.norm, "verifier_lm_head.weight": teacher.head}
    if set(own) != set(ours):
        raise ValueError(
            f"weights differ by name: only speculators {set(own) - set(ours)}, only ours {set(ours) - set(own)}"
        )
    with torch.no_grad():
        for name, weight in own.items():
            weight.copy_(ours[name])
    return model.to(draft.fc.weight.device)


def peer_batch(case: Case, batch: PackedBatch) -> dict[str, torch.Tensor]:
    """The batch as speculators' loader shifts and pads it: row t holds f_t, x_{t+1}, g_{t+1} and m_{t+1}."""
    rows = kept_rows(case).to(case.device)
    position = rows % case.length
    fields = {
        "hidden_states": batch.hidden_states[rows, :3].flatten(1),
        "verifier_last_hidden_states": batch.hidden_states[rows + 1, 3],
        "input_ids": batch.input_ids[rows + 1],
        "loss_mask": batch.loss_mask.to(case.device)[rows + 1],
        "document_ids": rows // case.length,
        "position_ids": 1 + position,
    }
    padding = case.tokens - len(rows)

    def padded(name: str, value: torch.Tensor) -> torch.Tensor:
        fill = value.new_full((padding, *value.shape[1:]), -1 if name == "document_ids" else 0)
        return torch.cat([value, fill])[None]

    return {name: padded(name, value) for name, value in fields.items()}


def kept_rows(case: Case) -> torch.Tensor:
    """The packed rows that speculators keeps: all but the last of each sample."""
    rows = torch.arange(case.tokens)
    return rows[rows % case.length != case.length - 1]


def peer_step(case: Case, model: torch.nn.Module) -> Callable[[PackedBatch], None]:
    import speculators.models.eagle3.metrics as metrics
    from speculators.losses import resolve_loss_config

    if case.device.type == "cuda" and not hasattr(metrics.compound_loss, "_torchdynamo_disable"):
        # torch 2.11 fails to compile the fused loss's kernel into the graph
        metrics.compound_loss = torch.compiler.disable(metrics.compound_loss)
    optimizer = optimizer_of(model)
    losses = resolve_loss_config("kl_div", "fused" if case.device.type == "cuda" else "eager")

    def step(batch: dict[str, torch.Tensor]) -> None:
        with torch.autocast(case.device.type, dtype=torch.bfloat16, enabled=case.dtype == torch.bfloat16):
            _, loss, _ = model(**batch, ttt_steps=case.steps, ttt_step_loss_decay=DECAY, loss_config=losses)
        train(model, optimizer, loss)

    return step


def peer_rows(case: Case, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The KL of every packed row at every step [T, steps] on the CPU; NaN where speculators' mask leaves it out."""
    import speculators.models.eagle3.core as core
    from speculators.losses.eager import kl_div_loss

    found = torch.full((case.tokens, case.steps), float("nan"))
    kept = kept_rows(case)
    original = core.compute_metrics

    def recording(logits, targets, loss_mask, prev_correct, step, *args, **kwargs) -> tuple:  # noqa: ANN001, ANN002, ANN003
        count = len(kept) - step
        for part in torch.arange(count).split(1024):
            part = part.to(logits.device)
            values = kl_div_loss(logits[:, part], targets[:, part + step])[0]
            counted = loss_mask[0, part + step].bool()
            found[kept[part.cpu()], step] = torch.where(counted, values, float("nan")).float().cpu()
        return torch.zeros((), device=logits.device), {}

    core.compute_metrics = recording
    autocast = torch.autocast(case.device.type, dtype=torch.bfloat16, enabled=case.dtype == torch.bfloat16)
    try:
        with torch.no_grad(), autocast, torch._dynamo.config.patch(disable=True):
            model(**batch, ttt_steps=case.steps, ttt_step_loss_decay=DECAY)
    finally:
        core.compute_metrics = original
    return found


def peer_flops(case: Case) -> float:
    """speculators computes every row at every step."""
    c = case.config
    hidden, ffn, vocabulary, qkv = c.hidden_size, c.intermediate_size, c.draft_vocab_size, c.q_size + 2 * c.kv_size
    layer = 2 * hidden * qkv + c.q_size * hidden + 3 * hidden * ffn + c.q_size * case.length
    per_token = 4 * 3 * hidden**2 + case.steps * (6 * layer + 4 * vocabulary * hidden) + 2 * vocabulary * hidden
    return case.tokens * per_token


# --- measuring -----------------------------------------------------------------------------------------------------


def synchronize(case: Case) -> None:
    if case.device.type == "cuda":
        torch.cuda.synchronize()


def timed(case: Case, step: Callable, batches: list, flops: float, repeats: int) -> dict[str, float]:
    """The mean of `repeats` steps in a row, in turn over the batches, after warming up."""
    for index in range(WARM_UP):
        step(batches[index % len(batches)])
    if case.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    synchronize(case)
    start = time.perf_counter()
    for index in range(repeats):
        step(batches[index % len(batches)])
    synchronize(case)
    seconds = (time.perf_counter() - start) / repeats
    peak = torch.cuda.max_memory_allocated() if case.device.type == "cuda" else float("nan")
    return {
        "step_s": round(seconds, 4),
        "tokens_per_s": round(case.tokens / seconds),
        "peak_gb": round(peak / 1e9, 1),
        "tflops": round(flops / seconds / 1e12, 2),
    }


def agreement(case: Case, ours: torch.Tensor, peer: torch.Tensor) -> dict[str, float]:
    """How far the KL of a row differs, of itself or of 1 if that is more, over the rows that both supervise.

    ValueError if the largest difference is too large.
    """
    both = ~(ours.isnan() | peer.isnan())
    ours, peer = ours[both], peer[both]
    difference = (ours - peer).abs() / peer.clamp_min(1)
    if not difference.max() <= KL_TOLERANCE[case.dtype]:
        raise ValueError(f"row KL differs by up to {difference.max():.2e}, allowed {KL_TOLERANCE[case.dtype]:.0e}")
    return {
        "rows_both_supervise": len(ours),
        "mean_kl": ours.mean().item(),
        "mean_difference": difference.mean().item(),
        "max_difference": difference.max().item(),
    }


def release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure_ours(case: Case, batches: list[PackedBatch], repeats: int) -> tuple[torch.Tensor, dict[str, float]]:
    """The row losses of the first batch, and the results."""
    draft, teacher = draft_and_teacher(case)
    rows = our_rows(case, draft, teacher, batches[0])
    return rows, timed(case, our_step(case, draft, teacher), batches, our_flops(case), repeats)


def measure_peer(
    case: Case, batches: list[dict], repeats: int, attention: str
) -> tuple[torch.Tensor, dict[str, float]]:
    """The same for speculators. Uncompiled, its flex_attention would hold every score: the rows are by sdpa."""
    rows = peer_rows(case, peer_model(*draft_and_teacher(case), "sdpa"), batches[0])
    release()
    model = peer_model(*draft_and_teacher(case), attention)
    return rows, timed(case, peer_step(case, model), batches, peer_flops(case), repeats)


def measure(cases: list[Case], repeats: int, ours_only: bool, attention: str) -> Iterator[dict[str, Any]]:
    """Yields results a line: ours for each case, the peer's for the first, how the two agree there, the ratios."""
    our_row_losses, speeds = [], []
    for case in cases:
        rows, ours = measure_ours(case, [random_batch(case, seed) for seed in (1, 2)], repeats)
        our_row_losses.append(rows)
        speeds.append(ours["tokens_per_s"])
        release()
        yield {"side": "ours", "supervised": case.supervised} | ours
    if ours_only:
        return
    case = cases[0]
    batches = [peer_batch(case, random_batch(case, seed)) for seed in (1, 2)]
    rows, peer = measure_peer(case, batches, repeats, attention)
    yield {"side": "speculators 0.9.0"} | peer
    yield {"agreement": agreement(case, our_row_losses[0], rows)}
    yield {"ratio": {c.supervised: round(s / peer["tokens_per_s"], 2) for c, s in zip(cases, speeds, strict=True)}}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="kimi", help="sizes of the draft")
    parser.add_argument("--full-vocab", action="store_true", help="draft over the target's whole vocabulary")
    parser.add_argument("--samples", type=positive_int, default=4, help="samples in a batch")
    parser.add_argument("--length", type=positive_int, default=2048, help="tokens of a sample")
    parser.add_argument("--ttt-steps", type=positive_int, default=7, help="steps of the training-time test")
    parser.add_argument("--supervised", type=float, nargs="+", default=[0.7], help="answer's share of a sample")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--repeats", type=positive_int, default=6, help="timed steps")
    parser.add_argument("--ours-only", action="store_true", help="without speculators")
    parser.add_argument(
        "--attention", help="speculators' attention (default: simple_flex_attention on a GPU, else sdpa)"
    )
    return parser.parse_args()


def cases(args: argparse.Namespace) -> Iterator[Case]:
    sizes, vocabulary, draft_vocabulary = PRESETS[args.preset]
    config = DraftConfig(
        **sizes,
        norm_eps=1e-6,
        rope={"rope_type": "default", "rope_theta": 50000.0},
        max_positions=8192,
        target_vocab_size=vocabulary,
        draft_vocab_size=vocabulary if args.full_vocab else draft_vocabulary,
    )
    device = torch.device(args.device)
    dtype = getattr(torch, args.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    for supervised in args.supervised:
        yield Case(config, args.samples, args.length, args.ttt_steps, supervised, device, dtype)


def main() -> None:
    args = parse()
    attention = args.attention or ("simple_flex_attention" if args.device.startswith("cuda") else "sdpa")
    for line in measure(list(cases(args)), args.repeats, args.ours_only, attention):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
