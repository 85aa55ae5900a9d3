"""The training of a draft: one flat loop over the optimizer steps of a schedule that depends on the seed alone.

What a run writes into its folder: checkpoints/ (see eagle3/checkpoint.py), metrics.jsonl, tensorboard/, settings.json,
and draft/, the export of the best weights so far.
"""

import argparse
import itertools
import math
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from eagle3 import card, checkpoint, files, runs, status
from eagle3.batches import Pack, Schedule, check_fit, loss_mask, pack, read_ahead
from eagle3.checkpoint import Position
from eagle3.draft import NORM_FLAGS, Draft, DraftConfig, Teacher, embedding
from eagle3.export import export
from eagle3.flops import device_peak, training_flops
from eagle3.initial import InitialDraft
from eagle3.metrics import Recorder, Sums, Window, check_trackers, line, memory_gb
from eagle3.optim import Optimizer
from eagle3.parts import Course, Samples
from eagle3.ranks import Ranks, gradients
from eagle3.states import HiddenStates
from eagle3.status import Counted, Status
from eagle3.target import Target
from eagle3.ttt import counts_of, supervised_counts, supervised_depth, training_loss

DECAY = 0.8  # weight of training-time-test step i is DECAY**i (EAGLE-3)
MAX_SKIPPED, MAX_SKIPPED_SHARE = 10, 0.05  # steps with a gradient that is not finite, before the run ends
DRAFT = "draft"
MAX_CHAIN = 16  # guesses in a row: even where each is right 2 times in 3, a chain of 16 is right once in 600
PACKAGES = ("torch", "safetensors", "numpy")  # whose versions settings.json names


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What determines the weights that come out; a run goes on only with the settings it began with."""

    ttt_steps: int
    epochs: int
    max_steps: int | None
    """Optimizer steps at which the schedule ends early; None: all epochs."""
    lr: float
    warmup_fraction: float
    """Share of the steps over which the learning rate rises."""
    batch_tokens: int
    """Tokens of a pack: what one rank passes through the draft at once."""
    grad_accumulation: int
    """Packs a rank in one optimizer step."""
    max_grad_norm: float
    weight_decay: float
    optimizer: str
    loss: str
    seed: int
    eval_fraction: float
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    train_head: bool
    deterministic: bool
    init_from: str | None

    @property
    def norm_flags(self) -> dict[str, bool]:
        return {flag: getattr(self, flag) for flag in NORM_FLAGS}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training: what to learn from, how, where to, and what may differ when it goes on."""

    folder: Path
    target: Target
    states: HiddenStates
    settings: Settings
    initial: InitialDraft | None
    num_speculative_tokens: int
    log_interval: int
    checkpoint_interval: int | None
    """Steps between two checkpoints, each with an evaluation; None: an epoch of the first packing."""
    keep: int
    trackers: list[str]

    @property
    def identity(self) -> dict[str, Any]:
        """What a checkpoint must agree with to be gone on with; in `part` only while those parts are trained on."""
        return {"settings": asdict(self.settings), "data": self.states.identity, "part": self.states.part_identity}

    def position(self) -> Position:
        """Where the run stands: its last checkpoint, or the beginning.

        ValueError if that was another run, or if other parts are its next.
        """
        position, parts, identity = Position(), self.states.parts, self.identity
        if steps := checkpoint.steps_on_disk(self.folder):
            position, stored = checkpoint.read_position(self.folder, steps[-1])
            between = position.step == position.part_start or self.trained(position)
            if between and stored["part"]["numbers"] != parts.numbers:
                identity.pop("part"), stored.pop("part")
            checkpoint.check_same_run(self.folder, stored, identity)
        parts.check_turn(position.parts_done)
        return position

    def trained(self, position: Position) -> bool:
        """Whether the parts at hand have been trained to their end."""
        return self.states.parts.last <= position.parts_done

    def samples(self, position: Position) -> Samples:
        """What is trained on and what is held out. ValueError if the two cannot be had."""
        done = 0 if self.trained(position) else position.parts_done
        return Samples.of(self.states.data, self.settings.eval_fraction, done, self.folder)


def plan_run(args: argparse.Namespace) -> Run:
    """Check the flags of 03_train_draft.py against target and hidden states. ValueError names what does not fit."""
    settings = Settings(**{field.name: getattr(args, field.name) for field in fields(Settings)})
    _check_chain("--ttt-steps", settings.ttt_steps, "7 in EAGLE-3; each step costs as much as the first")
    _check_chain("--num-speculative-tokens", args.num_speculative_tokens, "3 to 5 are usual")
    if args.output_dir.resolve() in {folder.resolve() for folder in args.hidden_states}:
        raise ValueError(f"--output-dir {args.output_dir}: holds the hidden states themselves; name another folder")
    runs.check_output_folder(args.output_dir, "train")
    target = Target.open(args.model_path)
    states = HiddenStates.open_all(args.hidden_states, target)
    check_fit(states.data, settings.batch_tokens)
    if settings.max_steps is not None and settings.max_steps < states.parts.total:
        raise ValueError(f"--max-steps {settings.max_steps}: fewer than the {states.parts.total} parts that share them")
    DraftConfig.for_target(target, states.vocab, **settings.norm_flags)
    check_trackers(args.track)
    run = Run(
        folder=args.output_dir,
        target=target,
        states=states,
        settings=settings,
        initial=_initial(settings, states, target),
        num_speculative_tokens=args.num_speculative_tokens,
        log_interval=args.log_interval,
        checkpoint_interval=args.checkpoint_interval,
        keep=args.keep,
        trackers=args.track,
    )
    position = run.position()
    if not supervised_counts(*loss_mask(states.data, run.samples(position).train), 1).any():
        where = " ".join(map(str, args.hidden_states))
        raise ValueError(f"--hidden-states {where}: no sample has two generated tokens in a row to learn from")
    return run


def _check_chain(flag: str, number: int, hint: str) -> None:
    if number > MAX_CHAIN:
        raise ValueError(f"{flag} {number}: expected 1 to {MAX_CHAIN} ({hint}); a longer chain is hardly ever accepted")


def _initial(settings: Settings, states: HiddenStates, target: Target) -> InitialDraft | None:
    if settings.init_from is None:
        return None
    initial = InitialDraft.open(Path(settings.init_from), states.layer_ids, target.num_layers)
    differing = {flag: value for flag, value in initial.flags.items() if value != settings.norm_flags[flag]}
    if differing:
        needed = " ".join(f"--{'' if value else 'no-'}{flag.replace('_', '-')}" for flag, value in differing.items())
        raise ValueError(f"--init-from {initial.folder}: needs {needed}, as it was trained")
    return initial


def run_training(run: Run) -> bool:
    """Train `run` to its end, or that of the parts at hand, and say so; False if it was asked to stop before."""
    ranks, draft, parts = Ranks.join(), run.folder / DRAFT, run.states.parts
    try:
        if run.trained(before := run.position()):
            what = "finished" if before.finished else f"part {parts} was trained"
            ranks.say(f"{what} before, at step {before.step}: the draft is {draft}")
            mark_trained(run, ranks)
            return True
        with _held(run.folder) if ranks.first else nullcontext() as kept:
            trainer = Trainer.start(run, ranks)
            trainer.announce()
            trainer.rehearse_export()
            position = train(trainer)
            if kept and not run.trained(position):
                kept.state = "stopped"
    finally:
        ranks.leave()
    if not run.trained(position):
        ranks.say(f"stopped after step {position.step} of {trainer.course.end}: the same command goes on from there")
        return False
    what = "done" if position.finished else f"part {parts} is trained, part {parts.last + 1}/{parts.total} is next"
    ranks.say(f"{what}: {position.step} steps, the best draft (step {position.best_step}) is {draft}")
    mark_trained(run, ranks)
    return True


@contextmanager
def _held(folder: Path) -> Iterator[Status]:
    """The folder for this process alone; its status file is kept meanwhile."""
    with files.locked(folder), Status(folder / runs.STATUS, "train") as kept:
        yield kept


def mark_trained(run: Run, ranks: Ranks) -> None:
    """For scripts that delete a part once it is trained: a file that says so. The checkpoint is what counts here."""
    parts = run.states.parts
    if ranks.first and parts.total > 1:
        for name in parts.markers:
            files.write_json(run.folder / name, {"trained": str(parts)})


class StopRequest:
    """Within the block, the first SIGTERM or Ctrl-C asks the loop to stop after its step; a second one ends at once."""

    def __init__(self) -> None:
        self.name: str | None = None

    def __enter__(self) -> "StopRequest":
        self._before = {kind: signal.signal(kind, self._ask) for kind in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for kind, handler in self._before.items():
            signal.signal(kind, handler)

    def _ask(self, number: int, _frame: FrameType | None) -> None:
        self.name = signal.Signals(number).name
        for kind, handler in self._before.items():
            signal.signal(kind, handler)


@dataclass
class Trainer:
    """All that one process trains with."""

    run: Run
    ranks: Ranks
    draft: Draft
    teacher: Teacher
    optimizer: Optimizer
    position: Position
    samples: Samples
    schedule: Schedule
    eval_packs: list[Pack]
    course: Course
    checkpoint_interval: int
    recorder: Recorder | None

    @classmethod
    def start(cls, run: Run, ranks: Ranks) -> "Trainer":
        """Build the draft, or restore the last checkpoint of `run.folder`."""
        settings, data = run.settings, run.states.data
        if settings.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is refused
        torch.use_deterministic_algorithms(settings.deterministic)
        position = run.position()
        draft, teacher = build(run, ranks.device)
        optimizer = Optimizer(draft, settings.optimizer, settings.weight_decay)
        if run.initial is not None:
            run.initial.load_into(draft, run.states.vocab)
        if position.step:
            restore(draft, optimizer, checkpoint.load(run.folder, position.step))
        position.packs_per_step = position.packs_per_step or settings.grad_accumulation * ranks.world
        samples, budget = run.samples(position), settings.batch_tokens
        if ranks.first and not run.states.parts.all_at_once:
            samples.keep(run.folder)
        packs, epochs = position.packs_per_step, settings.epochs
        schedule = Schedule(data.lengths, samples.train, budget, packs, settings.seed, epochs)
        done, start = position.parts_done, position.part_start
        course = Course.of(run.states.parts, done, start, len(schedule), settings.max_steps)
        eval_packs = pack(samples.held_out_data.lengths, samples.held_out, budget)
        recorder = Recorder(run.folder, run.trackers, asdict(settings), position.step) if ranks.first else None
        return cls(
            run, ranks, draft, teacher, optimizer, position, samples, schedule, eval_packs, course,
            run.checkpoint_interval or len(schedule.epoch(0)), recorder,
        )  # fmt: skip

    def mine(self, packs: list[Pack]) -> list[Pack]:
        """This rank's packs of a step."""
        return packs[self.ranks.rank :: self.ranks.world]

    def announce(self) -> None:
        """What is about to be done, in numbers."""
        run, position, schedule = self.run, self.position, self.schedule
        trained = sum(p.numel() for p in self.optimizer.parameters.values())
        tokens = schedule.lengths[schedule.samples].sum()
        rows = supervised_counts(*loss_mask(run.states.data, schedule.samples), 1).item()
        if self.course.total > 1:
            self.ranks.say(
                f"part {run.states.parts} of one schedule: steps {self.course.start:,} to {self.course.end:,}"
            )
        self.ranks.say(
            f"data: {len(schedule.samples):,} samples to train on, {tokens:,} tokens, {rows:,} supervised rows; "
            f"{sum(map(len, self.eval_packs)):,} samples held out\n"
            f"draft: {trained:,} trained weights, vocabulary {run.states.vocab.size:,} of {run.target.vocab_size:,}, "
            f"layers {run.states.layer_ids}\n"
            f"steps: {self.course.num_steps:,} of {schedule.packs_per_step} packs of {schedule.budget:,} tokens, "
            f"on {self.ranks.world} rank(s) of {self.ranks.device.type}"
        )
        if position.step:
            self.ranks.say(f"resumed: {checkpoint.folder_of(run.folder, position.step)}")
        if self.ranks.first:
            command, versions = " ".join(sys.argv), {name: version(name) for name in PACKAGES}
            counts = {
                "samples": len(schedule.samples),
                "tokens": int(tokens),
                "supervised_rows": rows,
                "held_out_samples": sum(map(len, self.eval_packs)),
                "trained_weights": trained,
            }
            details = {"command": command, "ranks": self.ranks.world, "versions": versions, "counts": counts}
            files.write_json(run.folder / runs.SETTINGS, details | run.identity)

    def rehearse_export(self) -> None:
        """Before the first step: a draft that could not be served is found now, not after an epoch."""
        if self.ranks.first and not self.position.step and (unchecked := export_draft(self, publish=False)):
            self.ranks.say(unchecked)

    def record(self, kind: str, values: dict[str, Any]) -> None:
        if self.recorder is not None:
            self.recorder.write(kind, values)


def build(run: Run, device: torch.device) -> tuple[Draft, Teacher]:
    """A new draft and its teacher: three tensors of the target are read, no more. Frozen rows are shared by the two."""
    torch.manual_seed(run.settings.seed)
    config = DraftConfig.for_target(run.target, run.states.vocab, **run.settings.norm_flags)
    teacher = Teacher.for_target(run.target, run.states.vocab).to(device)
    rows = embedding(run.target).to(device)
    train_head = run.settings.train_head
    draft = Draft.create(config, rows, teacher.head, train_head=train_head)
    return draft, teacher


def state(draft: Draft, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Everything that changes while training, as named tensors."""
    weights = {f"draft.{name}": parameter.detach() for name, parameter in optimizer.parameters.items()}
    moments = {f"optimizer.{name}": tensor for name, tensor in optimizer.state().items()}
    return weights | moments | {"random": torch.get_rng_state()}


def restore(draft: Draft, optimizer: Optimizer, tensors: dict[str, torch.Tensor]) -> None:
    """The inverse of `state`."""
    for name, parameter in optimizer.parameters.items():
        parameter.data.copy_(tensors[f"draft.{name}"])
    moments = {k.removeprefix("optimizer."): v for k, v in tensors.items() if k.startswith("optimizer.")}
    optimizer.load(moments)
    torch.set_rng_state(tensors["random"])


def train(trainer: Trainer) -> Position:
    """Train to the end of the schedule, or until asked to stop; either way the last step is in a checkpoint.

    RuntimeError when too many steps had a gradient that is not finite.
    """
    run, ranks, position, optimizer = trainer.run, trainer.ranks, trainer.position, trainer.optimizer
    settings, data, course = run.settings, run.states.data, trainer.course
    parameters = list(optimizer.parameters.values())
    decays = DECAY ** torch.arange(settings.ttt_steps, dtype=torch.float64)
    window = Window(settings.ttt_steps, ranks.device)
    steps, ahead = itertools.tee(
        itertools.islice(trainer.schedule.steps(position.step - course.start), course.end - position.step)
    )
    batches = read_ahead(data, itertools.chain.from_iterable(trainer.mine(p) for _, p in ahead), ranks.device)
    with StopRequest() as stop:
        for epoch, packs in steps:
            mask, offsets = loss_mask(data, itertools.chain(*packs))
            depth = supervised_depth(mask, offsets, settings.ttt_steps)
            counts = counts_of(depth, settings.ttt_steps)
            window.flops += training_flops(trainer.draft.config, depth, offsets, settings.train_head)
            weights = (decays / counts.clamp(min=1)).float().to(ranks.device)
            sums = Sums(settings.ttt_steps, ranks.device)
            for _ in trainer.mine(packs):
                with window.waiting():
                    batch = next(batches)
                output = training_loss(trainer.draft, trainer.teacher, batch, weights, loss=settings.loss)
                if output.loss.requires_grad:
                    output.loss.backward()
                sums.add(output)
            stopping = torch.tensor(float(stop.name is not None), device=ranks.device)
            ranks.sum(*gradients(parameters), stopping)  # all ranks stop after the same step
            norm = torch.nn.utils.clip_grad_norm_(parameters, settings.max_grad_norm).item()
            lr = course.learning_rate(position.step, settings.warmup_fraction, settings.lr)
            if math.isfinite(norm):
                optimizer.step(lr)
                window.add(sums, norm)
            else:
                position.skipped += 1
                check_skipped(trainer, norm)
            optimizer.zero_grad()
            position.step += 1
            tokens = sum(int(data.lengths[samples].sum()) for samples in packs)
            position.tokens += tokens
            window.tokens += tokens
            stopped, last = stopping.item() > 0, position.step == course.end
            if (position.step % run.log_interval == 0 or last) and window.norms:
                log(trainer, window, epoch, lr)
            if (position.step - course.start) % trainer.checkpoint_interval == 0 or last or stopped:
                with window.paused():
                    save(trainer, epoch, judge=last or not stopped)
            if stopped:
                break
    return position


def check_skipped(trainer: Trainer, norm: float) -> None:
    """Say that a step was skipped; RuntimeError above the share of such steps that a run may have."""
    position = trainer.position
    trainer.ranks.say(f"step {position.step + 1}: gradient norm {norm}, step skipped ({position.skipped} so far)")
    if position.skipped > max(MAX_SKIPPED, MAX_SKIPPED_SHARE * position.step):
        raise RuntimeError(
            f"{position.skipped} of {position.step + 1} steps had a gradient that is not finite: the states or the "
            "learning rate are bad (look at the loss in metrics.jsonl; try a lower --lr). The last checkpoint is kept"
        )


def log(trainer: Trainer, window: Window, epoch: float, lr: float) -> None:
    """One line and one record on the steps since the last one."""
    run, ranks, position = trainer.run, trainer.ranks, trainer.position
    rates = window.rates(ranks.world, device_peak(ranks.device))
    values = {
        "step": position.step,
        "epoch": epoch,
        **window.sums.means(ranks, DECAY, run.num_speculative_tokens),
        "grad_norm": sum(window.norms) / len(window.norms),
        "lr": lr,
        **rates,
        "memory_gb": memory_gb(ranks.device),
        "skipped": position.skipped,
        "eta_s": (trainer.course.num_steps - position.step) * rates["step_s"],
    }
    window.norms.clear()
    ranks.say(line(values, trainer.course.num_steps, run.settings.epochs))
    trainer.record("train", values)
    if ranks.first:
        what, step, total = f"{rates['tokens_per_s']:,.0f} tokens/s", position.step, trainer.course.num_steps
        status.tell(Counted(what, "steps", step, total, 1 / rates["step_s"], values["eta_s"]))


@torch.no_grad()
def evaluate(trainer: Trainer) -> dict[str, Any]:
    """The means over the held-out split, of all ranks together."""
    settings, ranks = trainer.run.settings, trainer.ranks
    sums = Sums(settings.ttt_steps, ranks.device)
    weights = torch.ones(settings.ttt_steps, device=ranks.device)
    for batch in read_ahead(trainer.samples.held_out_data, trainer.mine(trainer.eval_packs), ranks.device):
        sums.add(training_loss(trainer.draft, trainer.teacher, batch, weights, loss=settings.loss))
    return sums.means(ranks, DECAY, trainer.run.num_speculative_tokens)


def save(trainer: Trainer, epoch: float, judge: bool) -> None:
    """Write a checkpoint; with `judge`, evaluate before it and export the draft if it is the best so far.

    Without a held-out split every draft is exported. The export comes first, so that a run killed between the two
    makes both again.
    """
    run, ranks, position = trainer.run, trainer.ranks, trainer.position
    if judge and (not trainer.eval_packs or judged_best(trainer, epoch)):
        position.best_step = position.step
        if ranks.first:
            export_draft(trainer)
            ranks.say(f"exported: {run.folder / DRAFT}")
            ranks.say(card.write(run.folder / DRAFT))
    if position.step == trainer.course.end:
        position.parts_done, position.part_start = run.states.parts.last, position.step
        position.finished = position.parts_done == run.states.parts.total
    path = checkpoint.save(run.folder, state(trainer.draft, trainer.optimizer), position, run.identity, ranks)
    if ranks.first:
        checkpoint.prune(run.folder, run.keep, position.best_step)
    ranks.say(f"checkpoint: {path}")


def export_draft(trainer: Trainer, *, publish: bool = True) -> str | None:
    """Export the draft as it is, for stage 4 and vLLM; see `export`."""
    run, states = trainer.run, trainer.run.states
    drafts, kwargs = run.num_speculative_tokens, states.template_kwargs
    folder, vocab, layer_ids = run.folder / DRAFT, states.vocab, states.layer_ids
    return export(folder, trainer.draft, run.target, vocab, layer_ids, drafts, kwargs, publish=publish)


def judged_best(trainer: Trainer, epoch: float) -> bool:
    """Evaluate, report, and say whether the estimated acceptance length is the highest so far."""
    position = trainer.position
    values = {"step": position.step, "epoch": epoch, **evaluate(trainer)}
    better = values["acceptance_length"] > position.best_length
    accepted = " ".join(f"{100 * share:4.1f}" for share in values["accepted"])
    trainer.ranks.say(
        f"held out: step {position.step}  loss {values['loss']:.4f}  accepted % {accepted}  estimated acceptance "
        f"length {values['acceptance_length']:.3f}  {'best so far' if better else f'best {position.best_length:.3f}'}"
    )
    trainer.record("eval", values)
    position.best_length = max(position.best_length, values["acceptance_length"])
    return better
