"""Which trainer makes the better draft of the same data, and which of our settings matter? Judged by vLLM.

    python bench/learning.py --model-path TARGET --hidden-states DIR --prompts mt_bench.jsonl gsm8k.jsonl --output OUT
    python bench/learning.py ... --speculators --tune-lr --ours "kl=" "ce=--loss ce" "7 steps=--ttt-steps 7"

Recipes are NAME=FLAGS: those of `--ours` are trained by 03_train_draft.py with `--config`, those of `--speculators` by
speculators 0.9.0's own trainer with its own defaults. All see the same samples, held-out split, tokens a step, number
of steps, warm-up, cosine, training-time-test steps and draft vocabulary. For a recipe that names no `--lr`, each of
`--tune-lr` is tried on seed 0. Each trainer's own held-out score chooses among rates, and among the checkpoints of a
run: ours by the highest estimated acceptance length, theirs by the lowest validation loss. Then every recipe is
trained with each seed, and every draft is served by vLLM, greedily, on the prompts.

Each two recipes are compared: ratio of the means over seeds of the acceptance length (all prompts
together), with the 95% interval of a paired bootstrap over prompts within their benchmarks.

What is finished is not done again. OUT/learning.json holds it all. `held out` in the table is each trainer's own
estimate, 1 + the shares of rows whose first 1, 2, 3 draft tokens are the target's choice; vLLM far below it would mean
that vLLM does not serve the draft as it was trained. Seconds are a whole process's, compiling included.
"""

import argparse
import importlib.util
import json
import math
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import combinations
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from bench import speculators_trainer  # noqa: E402
from eagle3 import bootstrap, files  # noqa: E402
from eagle3.batches import Schedule, split  # noqa: E402
from eagle3.cli import positive_int  # noqa: E402
from eagle3.states import HiddenStates  # noqa: E402
from eagle3.target import Target  # noqa: E402

TRIED = [1e-3, 2e-3, 5e-3, 1e-2]  # speculators' default is the first, ours for SmolLM2 the third


@dataclass(frozen=True)
class Recipe:
    """One way to train, by `ours` or by speculators."""

    name: str
    ours: bool
    flags: list[str]

    @property
    def has_lr(self) -> bool:
        return any(flag == "--lr" or flag.startswith("--lr=") for flag in self.flags)


@dataclass(frozen=True)
class Trained:
    """A finished training. `score`: the trainer's own, less is better; `held_out`: estimated acceptance length."""

    recipe: str
    seed: int
    lr: float | None
    draft: str
    score: float
    held_out: float
    seconds: float


Counts = dict[str, np.ndarray]  # of each benchmark, int64 [prompts, 2]: accepted tokens and passes of each prompt


@dataclass(frozen=True)
class Judged:
    """All of a recipe: the tries of its rate, its run with each seed, and what vLLM accepted of each run's draft."""

    tries: list[Trained]
    runs: list[Trained]
    served: list[Counts]


@dataclass(frozen=True)
class Study:
    """What all trainings share. `common`: the settings of 03, as its own parser reads them; `steps` of ours end within
    `epochs` with any seed."""

    args: argparse.Namespace
    common: argparse.Namespace
    states: HiddenStates
    steps: int
    epochs: int

    @classmethod
    def of(cls, args: argparse.Namespace) -> "Study":
        common = _script().parser().parse([*our_flags(args), "--output-dir", str(args.output)])
        states = HiddenStates.open(args.hidden_states, Target.open(args.model_path))
        train, _ = split(states.data.sample_ids, common.eval_fraction)
        schedule = Schedule(states.data.lengths, train, common.batch_tokens, common.grad_accumulation, 0, common.epochs)
        steps = args.steps or len(schedule)
        return cls(args, common, states, steps, math.ceil(steps / len(schedule.epoch(0))) + 1)

    @property
    def identity(self) -> str:
        return files.sha256_json([self.states.identity, self.common.eval_fraction])

    @property
    def data(self) -> Path:
        """The states in the layout of speculators, of this data and split alone."""
        return self.args.output / f"speculators-data-{self.identity[:12]}"

    def convert(self) -> None:
        """Write `data` unless it is there; it has its name only when it is whole."""
        if not self.data.exists():
            temporary = files.temporary_name(self.data)
            shutil.rmtree(temporary, ignore_errors=True)
            speculators_trainer.convert(self.states, self.common.eval_fraction, temporary)
            files.publish(temporary, self.data)


def _script() -> Any:
    """03_train_draft.py as a module."""
    spec = importlib.util.spec_from_file_location("train_draft", ROOT / "03_train_draft.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def our_flags(args: argparse.Namespace) -> list[str]:
    paths = ["--model-path", args.model_path, "--hidden-states", args.hidden_states, "--config", args.config]
    return [*map(str, paths), *shlex.split(args.flags)]


# --- training ------------------------------------------------------------------------------------------------------


def command(study: Study, recipe: Recipe, lr: float | None, seed: int, folder: Path) -> list[str]:
    rate = [] if lr is None else ["--lr", str(lr)]
    if recipe.ours:
        fixed = {"output-dir": folder, "seed": seed, "epochs": study.epochs, "max-steps": study.steps}
        script = [str(ROOT / "03_train_draft.py"), *our_flags(study.args), "--keep", "1", "--track"]
    else:
        common = study.common
        fixed = speculators_trainer.flags(
            study.states, common.eval_fraction, common.batch_tokens * common.grad_accumulation, study.steps, seed
        ) | {
            "verifier-name-or-path": study.args.model_path, "data-path": study.data, "save-path": folder,
            "log-dir": folder / "logs", "log-freq": common.log_interval, "ttt-steps": common.ttt_steps,
            "scheduler-type": "cosine", "scheduler-warmup-ratio": common.warmup_fraction,
        }  # fmt: skip
        script = [speculators_trainer.__file__, "--save-best"]
    pairs = [[f"--{k}", *map(str, v if isinstance(v, list) else [v])] for k, v in fixed.items()]
    return [*script, *(word for pair in pairs for word in pair), *rate, *recipe.flags]


def run_logged(words: Sequence[object], log: Path) -> None:
    """Run a Python script in a process of its own. RuntimeError with its last lines."""
    with open(log, "w") as out:
        code = subprocess.run([sys.executable, *map(str, words)], stdout=out, stderr=subprocess.STDOUT).returncode
    if code:
        raise RuntimeError(f"{log}: exit code {code}\n" + "\n".join(log.read_text().splitlines()[-20:]))


def train(study: Study, recipe: Recipe, lr: float | None, seed: int) -> Trained:
    """Train in a process of its own, unless this very command has finished before."""
    folder = study.args.output / recipe.name.replace(" ", "_") / f"lr-{lr or 'own'}-seed-{seed}"
    words, record, log = command(study, recipe, lr, seed, folder), folder / "trained.json", Path(f"{folder}.log")
    same = {"command": words, "data": study.identity}
    if record.is_file() and same.items() <= (before := files.read_json(record)).items():
        return Trained(**before["trained"])
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    run_logged(words, log)
    seconds = time.perf_counter() - start
    draft, score, held_out = _our_result(folder) if recipe.ours else _their_result(folder, study.args.drafts)
    trained = Trained(recipe.name, seed, lr, str(draft), score, held_out, seconds)
    files.write_json(record, same | {"trained": asdict(trained)})
    print(f"trained {recipe.name}, lr {lr or 'own'}, seed {seed}: held out {held_out:.3f}, {seconds:.0f} s", flush=True)
    return trained


def _our_result(folder: Path) -> tuple[Path, float, float]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    best = max(r["acceptance_length"] for r in records if r["kind"] == "eval")
    return folder / "draft", -best, best


def _their_result(folder: Path, drafts: int) -> tuple[Path, float, float]:
    draft = (folder / "checkpoint_best").resolve()
    found = files.read_json(draft / "val_metrics.json")
    accepted = [found[key] for i in range(drafts) if (key := f"full_acc_{i}_epoch") in found]
    return draft, found["loss_epoch"], 1 + sum(accepted)


def judge_all(study: Study, recipes: Sequence[Recipe]) -> list[Judged]:
    """Every recipe trained and served; `--jobs` trainings and engines at a time."""
    with ThreadPoolExecutor(study.args.jobs) as pool, ThreadPoolExecutor(len(recipes)) as waiting:
        return list(waiting.map(lambda recipe: judge(study, recipe, pool), recipes))


def judge(study: Study, recipe: Recipe, pool: Executor) -> Judged:
    """One recipe: its tries of a rate on seed 0, the other seeds with the best rate, and then every draft served."""
    tries, runs = train_recipe(study, recipe, pool)
    return Judged(tries, runs, list(pool.map(lambda run: counts(serve(study.args, run.draft)), runs)))


def train_recipe(study: Study, recipe: Recipe, pool: Executor) -> tuple[list[Trained], list[Trained]]:
    """One recipe's tries and runs, trained side by side in `pool`."""
    args = study.args
    rates = [None] if recipe.has_lr or not args.tune_lr else args.tune_lr
    tries = list(pool.map(lambda lr: train(study, recipe, lr, 0), rates))
    chosen = min(tries, key=lambda t: t.score)
    if len(tries) > 1:
        scores = ", ".join(f"{t.lr:g}: {t.held_out:.3f}" for t in tries)
        edge = chosen.lr in (min(rates), max(rates))
        print(f"{recipe.name}: held out by lr {scores}; chosen {chosen.lr:g}" + ", at the edge" * edge, flush=True)
    return tries, [chosen, *pool.map(lambda seed: train(study, recipe, chosen.lr, seed), range(1, args.seeds))]


# --- judging -------------------------------------------------------------------------------------------------------


def serve(args: argparse.Namespace, draft: str) -> dict[str, Any]:
    """04_evaluate_draft.py on a draft; its JSON."""
    output = Path(f"{draft}-evaluation.json")
    words = ["--model-path", args.model_path, "--draft", draft, "--prompts", *args.prompts, "--output", output]
    words += ["--num-speculative-tokens", args.drafts, "--concurrency", args.concurrency, *shlex.split(args.serving)]
    run_logged([ROOT / "04_evaluate_draft.py", *words], output.with_suffix(".log"))
    return files.read_json(output)


def counts(evaluation: dict[str, Any]) -> Counts:
    """Those of the one draft that was evaluated."""
    found: dict[str, list[tuple[int, int]]] = {}
    for answer in evaluation["answers"]:
        if (accepted := answer["accepted"]) is not None:  # the target alone accepts nothing
            found.setdefault(answer["benchmark"], []).append((sum(accepted), len(accepted)))
    return {name: np.array(rows) for name, rows in found.items()}


def acceptance_lengths(tables: Sequence[np.ndarray]) -> np.ndarray:
    """1 + accepted tokens a pass, of the prompts and then of each resample of them, [1 + resamples, drafts].

    `tables`: [prompts, drafts, 2] of each benchmark, see `counts`.
    """
    once = np.concatenate(tables).sum(0)
    draws = bootstrap.resampled_sums([table.reshape(len(table), -1) for table in tables])
    sums = np.concatenate([once[None], draws.reshape(-1, *once.shape)])
    return 1 + sums[..., 0] / sums[..., 1]


def ratio(lengths: np.ndarray, first: slice, other: slice) -> dict[str, float]:
    """How many times the acceptance length of the drafts `other` those of `first` have, each the mean over its drafts,
    with the bounds of the 95% interval. `lengths` as `acceptance_lengths` gives them."""
    quotients = lengths[:, first].mean(1) / lengths[:, other].mean(1)
    low, high = bootstrap.interval(quotients[1:])
    return {"ratio": float(quotients[0]), "low": low, "high": high}


def result(study: Study, judged: Sequence[Judged]) -> dict[str, Any]:
    """All together, as JSON."""
    trained, args = [run for recipe in judged for run in recipe.runs], study.args
    served = [table for recipe in judged for table in recipe.served]
    tables = {name: np.stack([table[name] for table in served], axis=1) for name in served[0]}
    every = acceptance_lengths([*tables.values()])
    lengths = {"all": every[0]} | {name: acceptance_lengths([table])[0] for name, table in tables.items()}
    of = {recipe.runs[0].recipe: slice(i * args.seeds, (i + 1) * args.seeds) for i, recipe in enumerate(judged)}
    packages = ["torch", "transformers", *(["speculators"] if study.data.exists() else [])]
    return {
        "arguments": vars(args),
        "settings": vars(study.common),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": {name: version(name) for name in packages},
        "data": study.states.identity,
        "steps": study.steps,
        "tries": [asdict(run) for recipe in judged for run in recipe.tries],
        "runs": [
            asdict(run) | {"acceptance_length": {name: float(found[i]) for name, found in lengths.items()}}
            for i, run in enumerate(trained)
        ],
        "ratios": [{"pair": [a, b]} | ratio(every, of[a], of[b]) for a, b in combinations(of, 2)],
    }


def table(found: dict[str, Any]) -> Iterator[str]:
    """The result as lines for a person."""
    names = list(found["runs"][0]["acceptance_length"])
    yield f"{'recipe':<24} seed       lr{''.join(f'{name:>11}' for name in names)}   held out   seconds"
    for run in found["runs"]:
        lengths = "".join(f"{run['acceptance_length'][name]:>11.3f}" for name in names)
        lr = "own" if run["lr"] is None else f"{run['lr']:g}"
        yield f"{run['recipe']:<24} {run['seed']:>4} {lr:>8}{lengths}{run['held_out']:>11.3f}{run['seconds']:>10.0f}"
    for r in found["ratios"]:
        yield f"{' / '.join(r['pair'])}: {r['ratio']:.3f} times, 95% interval {r['low']:.3f} to {r['high']:.3f}"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model-path", type=Path, required=True, metavar="TARGET")
    add("--hidden-states", type=Path, required=True, metavar="DIR", help="what 02 wrote")
    add("--prompts", type=Path, nargs="+", required=True, metavar="FILE", help="held-out prompts, one file a benchmark")
    add("--output", type=Path, required=True, metavar="DIR")
    add("--config", type=Path, default=ROOT / "configs" / "smollm2.yaml", metavar="FILE", help="settings of 03")
    add("--flags", default="", help="more flags of 03, for every recipe: '--epochs 8'")
    add("--ours", nargs="*", default=["ours="], metavar="NAME=FLAGS", help="for 03_train_draft.py")
    add(
        "--speculators", nargs="*", default=["speculators="], metavar="NAME=FLAGS", help="recipes for speculators.train"
    )
    add("--tune-lr", type=float, nargs="*", default=TRIED, metavar="X", help="rates tried; none: each side's own")
    add("--seeds", type=positive_int, default=3, metavar="N")
    add("--steps", type=positive_int, metavar="N", help="optimizer steps (those of our epochs)")
    add("--jobs", type=positive_int, default=1, metavar="N", help="trainings, or engines, at a time on one device (1)")
    add("--drafts", type=positive_int, default=3, metavar="N", help="tokens drafted when served (3)")
    add("--concurrency", type=positive_int, default=16, metavar="N", help="answers at a time (16)")
    add("--serving", default="", help="more flags of 04: '--max-tokens 128 --limit 20'")
    return parser.parse_args(argv)


def recipes_of(args: argparse.Namespace) -> list[Recipe]:
    """ValueError for a recipe without a name, or two of one name."""
    found = [(text.partition("="), True) for text in args.ours]
    found += [(text.partition("="), False) for text in args.speculators]
    recipes = [Recipe(name.strip(), ours, shlex.split(flags)) for (name, _, flags), ours in found]
    names = [recipe.name for recipe in recipes]
    if not names or not all(names) or len(set(names)) < len(names):
        raise ValueError(f"--ours, --speculators: expected different names, NAME=FLAGS each; found {names}")
    return recipes


def main() -> None:
    args = parse()
    recipes, study = recipes_of(args), Study.of(args)
    print(
        f"{study.steps:,} steps of {study.common.batch_tokens:,} tokens, {len(study.states.data):,} samples", flush=True
    )
    if not all(recipe.ours for recipe in recipes):
        study.convert()
    found = result(study, judge_all(study, recipes))
    files.write_json(args.output / "learning.json", json.loads(json.dumps(found, default=str)))
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
