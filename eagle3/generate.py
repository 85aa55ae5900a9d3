"""The generation stage: the target's own answers to prompts, so that the draft trains on what it will have to draft.

FILE.jsonl gets one row a prompt: the conversation with the answer, and the exact token ids and loss mask, which
stage 1 takes as they are: no rendering and tokenising anew that could differ from what the target said. While it runs,
finished answers are appended to FILE.jsonl.part; the same command goes on from there.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from eagle3 import chat, conversations, engine, files
from eagle3.progress import Progress
from eagle3.target import Target

if TYPE_CHECKING:
    from vllm import RequestOutput

QUEUED_PROMPT_TOKENS = 1 << 16
FORMAT = "eagle3-answers/1"
CUT_WARNING = 0.1  # share of answers cut by the length above which the user is told


@dataclass(frozen=True, kw_only=True)
class Options:
    """The flags of 00."""

    model_path: Path
    input: list[Path]
    output: Path
    max_tokens: int
    temperature: float
    top_p: float = 1.0
    seed: int = 0
    batch_size: int = 64
    tp_size: int = 1
    gpu_memory_utilization: float = 0.9
    max_model_len: int | None = None
    limit: int | None = None
    keep_cut: bool = False
    trust_remote_code: bool = False
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Generation:
    """A checked plan: `prompts` with their token ids, those of `done` answered before; `settings` as recorded."""

    options: Options
    chat: chat.Chat
    prompts: dict[str, conversations.Prompt]
    prompt_ids: dict[str, list[int]]
    settings: dict[str, Any]
    max_model_len: int

    @property
    def part(self) -> Path:
        return self.options.output.with_name(self.options.output.name + ".part")

    @property
    def settings_file(self) -> Path:
        return self.options.output.with_name(self.options.output.name + ".meta.json")

    @property
    def finished(self) -> bool:
        return self.options.output.is_file()


def plan_generation(options: Options, *, overwrite: bool = False) -> Generation:
    """Read and render the prompts and check them against the target. ValueError names what does not fit."""
    target = Target.open(options.model_path)
    model_chat = chat.load(target, options.trust_remote_code, options.chat_template_kwargs)
    drops = conversations.Drops()
    max_model_len = options.max_model_len or target.max_positions
    prompts, prompt_ids = _render(options, model_chat, max_model_len, drops)
    for line in drops.lines():
        print(line)
    if not prompts:
        raise ValueError(f"--input {' '.join(map(str, options.input))}: no usable prompt")
    longest = max(map(len, prompt_ids.values()))
    if options.max_model_len is None:  # no more KV cache than the prompts need
        max_model_len = min(target.max_positions, longest + options.max_tokens)
    settings = {
        "format": FORMAT,
        "target": target.fingerprint,
        "prompts": files.sha256_json(prompt_ids),
        **{k: v for k, v in asdict(options).items() if k in ("max_tokens", "temperature", "top_p", "seed", "keep_cut")},
        "chat_template_kwargs": options.chat_template_kwargs,
    }
    generation = Generation(options, model_chat, prompts, prompt_ids, settings, max_model_len)
    _check_output(generation, overwrite)
    return generation


def _render(
    options: Options, model_chat: chat.Chat, max_model_len: int, drops: conversations.Drops
) -> tuple[dict[str, conversations.Prompt], dict[str, list[int]]]:
    """The usable prompts by id and their token ids; the others are counted in `drops`."""
    prompts, prompt_ids = {}, {}
    for prompt in conversations.read_prompts(options.input, drops):
        if options.limit is not None and len(prompts) == options.limit:
            break
        try:
            ids = model_chat.prompt_ids(prompt.messages, prompt.tools)
            if len(ids) >= max_model_len:
                raise conversations.Drop("too_long", f"{len(ids)} tokens, {max_model_len} fit with an answer")
            if prompt.id in prompts:
                raise conversations.Drop("duplicate", f"id {prompt.id!r} was there before")
        except conversations.Drop as drop:
            drops.add(prompt.where, drop)
            continue
        prompts[prompt.id], prompt_ids[prompt.id] = prompt, ids
    return prompts, prompt_ids


def _check_output(generation: Generation, overwrite: bool) -> None:
    output, settings_file = generation.options.output, generation.settings_file
    if overwrite:
        for path in (output, generation.part, settings_file):
            path.unlink(missing_ok=True)
    elif settings_file.is_file():
        if difference := files.first_difference(files.read_json(settings_file), generation.settings):
            raise ValueError(f"--output {output}: begun with other settings: {difference} (or use --overwrite)")
    elif output.exists():
        raise ValueError(f"--output {output}: exists and was not written by this stage (or use --overwrite)")


def generate(generation: Generation) -> None:
    """Answer every prompt that has no answer yet, then write the output in the order of the prompts."""
    options = generation.options
    options.output.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(generation.settings_file, generation.settings)
    done = _answered(generation.part)
    print(f"prompts: {len(generation.prompts):,}, {len(done):,} of them answered before")
    if len(done) < len(generation.prompts):
        _answer_rest(generation, done)
    rows = _answered(generation.part)
    lines = [rows[i] for i in generation.prompts]
    cut = [json.loads(line)["finish_reason"] == "length" for line in lines]
    kept = [line for line, is_cut in zip(lines, cut, strict=True) if options.keep_cut or not is_cut]
    if not kept:
        raise ValueError(
            f"all {len(lines)} answers are cut by --max-tokens {options.max_tokens}: raise it, or --keep-cut"
        )
    with files.atomic(options.output) as temporary:
        temporary.write_text("".join(kept))
    generation.part.unlink()
    _report(options, len(kept), sum(cut))


def _answered(part: Path) -> dict[str, str]:
    """The whole lines of a .part file by prompt id; a line cut short by a kill is dropped from the file."""
    if not part.exists():
        return {}
    lines = part.read_text().splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
        part.write_text("".join(lines))
    return {json.loads(line)["id"]: line for line in lines}


def _answer_rest(generation: Generation, done: dict[str, str]) -> None:
    options = generation.options
    llm = engine.start(
        options.model_path,
        tp_size=options.tp_size,
        gpu_memory_utilization=options.gpu_memory_utilization,
        max_model_len=generation.max_model_len,
        dtype=str(engine.dtype_for(generation.chat.target)).removeprefix("torch."),
        max_num_seqs=options.batch_size,
        seed=options.seed,
    )
    try:
        counting = Progress("generate", len(generation.prompts), "answers", done=len(done))
        with open(generation.part, "a") as part, counting as progress:
            tokens = 0
            for output in engine.stream(llm, _requests(generation, done), QUEUED_PROMPT_TOKENS):
                tokens += len(output.outputs[0].token_ids)
                _append(part, _row(generation, output))
                progress.update(1, f"{tokens:,} tokens")
    finally:
        engine.stop(llm)


def _requests(generation: Generation, done: dict[str, str]) -> Iterator[engine.Request]:
    from vllm import SamplingParams

    options = generation.options
    for prompt_id, ids in generation.prompt_ids.items():
        if prompt_id not in done:
            params = SamplingParams(
                temperature=options.temperature,
                top_p=options.top_p,
                seed=None if options.temperature == 0 else options.seed,
                max_tokens=min(options.max_tokens, generation.max_model_len - len(ids)),
                stop_token_ids=generation.chat.stop_ids,
                detokenize=False,
            )
            yield engine.Request(prompt_id, ids, params)


def _row(generation: Generation, output: "RequestOutput") -> dict[str, Any]:
    """The finished answer as a row: readable messages, and the ids that were really generated."""
    prompt, answer = generation.prompts[output.request_id], output.outputs[0]
    ids = list(answer.token_ids)
    spoken = ids[:-1] if ids and ids[-1] in generation.chat.stop_ids else ids
    return {
        "id": prompt.id,
        "messages": [*prompt.messages, {"role": "assistant", "content": generation.chat.decode(spoken)}],
        "input_ids": generation.prompt_ids[prompt.id] + ids,
        "loss_mask": [0] * len(generation.prompt_ids[prompt.id]) + [1] * len(ids),
        "finish_reason": answer.finish_reason,
        "tokenizer": generation.settings["target"]["tokenizer"],
        **({"category": prompt.category} if prompt.category else {}),
    }


def _append(part: IO[str], row: dict[str, Any]) -> None:
    part.write(json.dumps(row, ensure_ascii=False) + "\n")
    part.flush()


def _report(options: Options, num_kept: int, num_cut: int) -> None:
    """Print what was made; warn when many answers were cut by the length."""
    answered = num_kept if options.keep_cut else num_kept + num_cut
    fate = "kept and marked" if options.keep_cut else "left out"
    print(f"done: {answered:,} answers = {num_kept:,} kept + {answered - num_kept:,} left out -> {options.output}")
    print(f"      {num_cut:,} of them were cut by --max-tokens {options.max_tokens} ({fate})")
    if num_cut > CUT_WARNING * answered:
        print(f"WARNING: {num_cut / answered:.0%} of the answers are cut; a larger --max-tokens gives whole ones")
