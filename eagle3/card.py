"""The model card of an exported draft: README.md beside its weights, from what the stages left around it.

    python -m eagle3.card out/draft --license apache-2.0 --base-model moonshotai/Kimi-K2.5

Stage 3 writes it with each export, stage 4 again with what it measured; licence and base model stay as they were set.
A card that somebody has made their own (without the line that says where it is from) is left alone.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagle3 import __version__, cli, figures, files, pages, runs

NAME = "README.md"
ORIGIN = "<!-- Written by eagle3-train and written anew by its stages; without this line the card is yours. -->"
UNKNOWN_LICENSE = "other"
TAGS = ("eagle3", "speculative-decoding", "draft-model", "speculators", "vllm")
FENCE = "---\n"


def write(draft: Path, evaluation: dict[str, Any] | None = None, **changes: str | None) -> str:
    """Write the card of the draft in this folder, and say so, or why not.

    `evaluation`: what stage 4 found; `changes`: license and base_model, where they are to be set. ValueError naming a
    file that is not as its stage writes it.
    """
    path = draft / NAME
    before = path.read_text() if path.is_file() else ""
    if before and ORIGIN not in before:
        return f"card: {path} is somebody's own, left alone"
    config = files.read_json(draft / "config.json")
    with runs.reading(draft / "config.json"):
        header = _header(config, _set(_header_of(before), changes))
        text = _text(draft, config, header, evaluation)
    try:
        pages.write(path, text)
    except OSError as error:
        return f"card: not written: {error}"
    return f"card: {path}"


def write_measured(evaluation: dict[str, Any]) -> Iterator[str]:
    """The cards of the drafts that stage 4 measured; a card that cannot be written is named and costs no figure."""
    for draft in dict.fromkeys(m["draft"] for m in evaluation["measurements"] if m["draft"]):
        try:
            yield write(Path(draft), evaluation)
        except ValueError as error:
            yield f"card: not written: {error}"


def _header_of(card: str) -> dict[str, Any]:
    """The front matter of a card; empty where there is none."""
    import yaml

    parts = card.split(FENCE, 2)
    try:
        found = yaml.safe_load(parts[1]) if len(parts) == 3 and not parts[0] else None
    except yaml.YAMLError:
        found = None
    return found if isinstance(found, dict) else {}


def _set(before: dict[str, Any], changes: dict[str, str | None]) -> dict[str, Any]:
    """What was set in an earlier card and is now; a licence that was not known is not set."""
    unknown = before.get("license") == UNKNOWN_LICENSE and "license_name" not in before
    gone = ("license", "license_name") if unknown or changes.get("license") else ()
    return {k: v for k, v in before.items() if k not in gone} | {k: v for k, v in changes.items() if v}


def _header(config: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The front matter: what is given, else what the draft's config and the target's own card say."""
    target = Path(config["speculators_config"]["verifier"]["name_or_path"])
    card = target / NAME
    of_target = _header_of(card.read_text(errors="replace")) if card.is_file() else {}
    source = given if "license" in given else of_target
    licence = {k: v for k, v in source.items() if k in ("license", "license_name")} or {"license": UNKNOWN_LICENSE}
    base_model = given.get("base_model", target.name)
    return licence | {"base_model": base_model, "pipeline_tag": "text-generation", "tags": list(TAGS)}


def _text(draft: Path, config: dict[str, Any], header: dict[str, Any], evaluation: dict[str, Any] | None) -> str:
    import yaml

    training = runs.Output("train", draft.parent)
    settings = training.content if training.file.is_file() else {}
    return pages.render(
        "card.md",
        header=yaml.safe_dump(header, sort_keys=False),
        origin=ORIGIN,
        license_unknown=header["license"] == UNKNOWN_LICENSE and "license_name" not in header,
        target=header["base_model"],
        config=config,
        layer=config["transformer_layer_config"],
        layer_ids=[aux_id - 1 for aux_id in config["eagle_aux_hidden_state_layer_ids"]],
        method=config["speculators_config"]["proposal_methods"][0],
        settings=settings.get("settings", {}),
        counts=settings.get("counts", {}),
        versions=settings.get("versions", {}) | {"eagle3-train": __version__},
        estimated=runs.best(runs.read_metrics(draft.parent)),
        measured=list(_measured(draft, evaluation)) if evaluation else [],
        evaluation=evaluation,
    )


def _measured(draft: Path, evaluation: dict[str, Any]) -> list[dict[str, Any]]:
    """The measurements of this draft."""
    same = draft.resolve()
    return [
        m
        for m in evaluation["measurements"]
        if m["num_speculative_tokens"] and Path(m["draft"] or "").resolve() == same
    ]


def evaluation_of(draft: Path) -> dict[str, Any] | None:
    """The newest evaluation under the run's folder that measured these very weights."""
    found = [o for o in runs.find(draft.parent) if o.stage == "evaluate" and o.file.is_file()]
    for output in reversed(found):
        with runs.reading(output.file):
            content = output.content
            figures.check_format(content)
            names = (m["draft_sha256"] or {} for m in _measured(draft, content))
            if any(
                all(files.sha256_file(draft / name) == value for name, value in sums.items()) and sums for sums in names
            ):
                return content
    return None


def parser() -> cli.Tool:
    p = cli.Tool("python -m eagle3.card", __doc__)
    p.add_argument("draft", type=Path, metavar="DIR", help="the draft folder that stage 3 wrote")
    p.add_argument("--license", metavar="NAME", help="as Hugging Face names it (default: the target's, or other)")
    p.add_argument("--base-model", metavar="ORG/NAME", help="the target on the hub (default: its folder)")
    return p


def check(args: argparse.Namespace) -> argparse.Namespace:
    if not (args.draft / "config.json").is_file():
        raise ValueError(f"{args.draft}: has no config.json; give the `draft` folder that 03_train_draft.py wrote")
    files.check_folder("DIR", args.draft)
    return args


def work(args: argparse.Namespace) -> None:
    print(write(args.draft, evaluation_of(args.draft), license=args.license, base_model=args.base_model))


if __name__ == "__main__":
    cli.run(parser(), check, work)
