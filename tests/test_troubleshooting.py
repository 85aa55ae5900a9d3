"""Every message in docs/troubleshooting.md is one that the programs print: found in the source, and produced here.

A message is a line "- `...`" of the document, `<...>` in it standing for what changes. PRODUCERS has for each a
function that makes the code of the project say it, through what raises or prints it in a real run; engines are
replayed (tests/replay.py), NVML is stood in for (tests/test_preflight.py).
"""

import ast
import dataclasses
import io
import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from eagle3 import (
    capture,
    cli,
    cluster,
    drafts,
    evaluate,
    extract,
    files,
    generate,
    gpus,
    preflight,
    prepared,
    runs,
    selfcheck,
    server,
    shards,
    tokenizer,
    train,
    vllm_source,
)
from eagle3.conversations import Drops
from eagle3.export import export
from eagle3.target import Target
from tests import replay, stages
from tests.chat_server import ChatServer
from tests.states_folder import random_samples, write_hidden_states
from tests.test_extract import write_prepared
from tests.test_preflight import DEEPSEEK, GIB, StandIn
from tests.training_run import LAYER_IDS, draft_vocab, planned

ROOT = stages.ROOT
DOCUMENT = ROOT / "docs/troubleshooting.md"
MESSAGES = re.findall(r"^- `(.+)`$", DOCUMENT.read_text(), re.M)
HOLE = "\N{REPLACEMENT CHARACTER}"
SOURCES = [*ROOT.glob("[0-9]*.py"), *(ROOT / "eagle3").glob("*.py")]
PRODUCERS: dict[str, Callable[["Bench"], str]] = {}


def pattern(message: str) -> re.Pattern[str]:
    """The message with anything in place of each <...>."""
    literal = re.split(r"<\w+>", message)
    return re.compile(".+".join(map(re.escape, literal)), re.S)


@cache
def templates() -> list[str]:
    """The strings of the source, HOLE where an f-string has a value."""
    return [text for path in SOURCES for node in ast.walk(ast.parse(path.read_text())) for text in _strings(node)]


def _strings(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.JoinedStr):
        yield "".join(part.value if isinstance(part, ast.Constant) else HOLE for part in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value


def produces(message: str) -> Callable[[Callable[["Bench"], str]], Callable[["Bench"], str]]:
    """Register the function as what makes the programs say `message`."""

    def register(function: Callable[["Bench"], str]) -> Callable[["Bench"], str]:
        PRODUCERS[message] = function
        return function

    return register


@dataclasses.dataclass
class Bench:
    """What producers work with: a folder of their own and the tiny targets."""

    folder: Path
    llama: Path
    kimi: Path

    @property
    def target(self) -> Target:
        return Target.open(self.llama)

    def options(self, **changes) -> extract.Options:
        """Stage 2 over six samples of 20 to 60 tokens."""
        data = self.folder / "prepared" / prepared.DATA
        if not data.exists():
            write_prepared(data.parent, self.llama, [20, 30, 40, 50, 60, 25])
        given = extract.Options(
            model_path=self.llama, prepared_data=data, output_dir=self.folder / "states", batch_size=2, max_seq_len=64,
            layer_ids=[1, 2, 3, 5], shard_bytes=100_000,
        )  # fmt: skip
        return dataclasses.replace(given, **changes)

    def extraction(self, **changes) -> extract.Extraction:
        return extract.plan_extraction(self.options(**changes))

    def states(self, lengths=(20, 30, 40), part=None, samples=None) -> Path:
        """Random states of the tiny Llama, as stage 2 leaves them."""
        samples = samples or random_samples(lengths, 4, 64, 512)
        name = f"hidden-{len(list(self.folder.iterdir()))}"
        return write_hidden_states(self.folder / name, self.target, samples, LAYER_IDS, draft_vocab(), part=part)

    def draft(self, template_kwargs=None) -> Path:
        """An untrained draft of the tiny Llama."""
        run = planned(self.llama, self.states(), self.folder / "run", eval_fraction=0)
        draft, _ = train.build(run, torch.device("cpu"))
        export(self.folder / "draft", draft, self.target, run.states.vocab, LAYER_IDS, 3, template_kwargs)
        return self.folder / "draft"


@pytest.fixture
def bench(tmp_path, tiny_llama, tiny_kimi) -> Bench:
    return Bench(tmp_path, tiny_llama, tiny_kimi)


@pytest.mark.parametrize("message", MESSAGES)
def test_the_message_is_in_the_source(message):
    """A reworded message leaves the reader with a line that no log has: each is a string of the source, with a value
    wherever the document has <...>."""
    assert len(re.sub(r"<\w+>", "", message)) >= 10, "too little text of its own to be found by"
    assert any(map(pattern(message).search, templates()))


@pytest.mark.parametrize("message", MESSAGES)
def test_the_message_is_said(message, bench):
    """Each message comes out of the program in the situation that the document describes."""
    assert pattern(message).search(PRODUCERS[message](bench))


def test_no_producer_is_left_over():
    """Producers and messages are the same set, and no message stands twice."""
    assert sorted(PRODUCERS) == sorted(MESSAGES)


def refused(call: Callable, *args, **kwargs) -> str:
    """What a call refuses with."""
    with pytest.raises((ValueError, LookupError, RuntimeError, OSError)) as error:
        call(*args, **kwargs)
    return str(error.value.args[0] if isinstance(error.value, LookupError) else error.value)


def printed(call: Callable, *args, **kwargs) -> str:
    """What a call prints, whether or not it succeeds."""
    log = io.StringIO()
    with redirect_stdout(log):
        call(*args, **kwargs)
    return log.getvalue()


def said_by(script: str, *flags: object) -> str:
    """The log of a script that refuses, run in this process."""
    code, log = stages.run_here(script, *flags)
    assert code == cli.REFUSED
    return log


# Any stage


@produces("--model-path <dir>: no such folder (give a local folder with config.json)")
def no_such_model(bench):
    return said_by(
        "03_train_draft.py", "--model-path", "moonshotai/Kimi-K2.5", "--hidden-states", bench.folder,
        "--output-dir", bench.folder / "out",
    )  # fmt: skip


@produces("<flag> <dir>: <folder> is not a folder that this user can write to")
def a_file_in_the_way(bench):
    (bench.folder / "file").touch()
    return refused(files.check_folder, "--output-dir", bench.folder / "file/states")


@produces("<dir>: its tokenizer is Python code of its own (<class>); add --trust-remote-code")
def remote_code(bench):
    return refused(tokenizer.load_tokenizer, Target.open(bench.kimi), False)


@produces("--output-dir <dir>: another run writes there (process <pid>)")
def two_runs(bench):
    with files.locked(bench.folder):
        return refused(files.locked(bench.folder).__enter__)


@produces("<where> was made with another target: its <what>")
def another_target(bench):
    options = bench.options()
    model = shutil.copytree(bench.llama, bench.folder / "model")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    return refused(extract.plan_extraction, dataclasses.replace(options, model_path=model))


# Stage 0


def generation(bench: Bench, **changes) -> generate.Generation:
    prompts = bench.folder / "prompts.jsonl"
    prompts.write_text('{"messages": [{"role": "user", "content": "Hello"}]}\n')
    output = bench.folder / "answers.jsonl"
    given = {"model_path": bench.llama, "input": [prompts], "output": output, "max_tokens": 8, "temperature": 0.0}
    return generate.plan_generation(generate.Options(**given | changes))


@produces("--output <file>: begun with other settings: <what> (or use --overwrite)")
def other_answers(bench):
    begun = generation(bench)
    files.write_json(begun.settings_file, begun.settings)
    return refused(generation, bench, temperature=1.0)


@produces("--base-url <url>: no server answers there (<why>)")
def no_server(bench):
    with ChatServer(lambda _: (200, {})) as running:
        url = running.url
    return refused(server.connect, url)


@produces("WARNING: <share> of the answers are cut; a larger --max-tokens gives whole ones")
def many_cut(bench):
    counts = generate.Counts(rows_in=2, dropped={}, kept=1, rows=1, answered=1, cut=1)
    return "\n".join(generate._report(generation(bench).options, counts))


@produces("no answer is left (<counts>); for cut ones raise --max-tokens, or --keep-cut")
def all_cut(bench):
    made = generation(bench)
    with open(bench.folder / "journal", "w+b") as file:
        journal = generate.Journal(file)
        (name,) = made.turns
        journal.append({"id": name, "rows": [], "answered": 0, "left_out": {"cut": 1}})
        return refused(generate._write_output, made, journal, Drops())


# Stage 1


def prepare_flags(bench: Bench, *more: object) -> list:
    chats = bench.folder / "chats.jsonl"
    if not chats.exists():
        chats.write_text('{"messages": [{"role": "user", "content": "Hello"}]}\n')
    return ["--model-path", bench.llama, "--input", chats, "--output-dir", bench.folder / "data", *more]


@produces("<why> of <rows>; no dataset was written. Dropped:")
def nothing_usable(bench):
    code, log = stages.run_here("01_prepare_data.py", *prepare_flags(bench))
    assert code == cli.FAILED
    return log


@produces("<dir> holds other data: its <what>; --overwrite replaces it")
def other_data(bench):
    turn = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day"}
    (bench.folder / "chats.jsonl").write_text(json.dumps({"messages": turn}) + "\n")
    code, log = stages.run_here("01_prepare_data.py", *prepare_flags(bench))
    assert code == cli.DONE, log
    return said_by("01_prepare_data.py", *prepare_flags(bench, "--max-seq-len", 99))


# Stage 2, before the load


@produces("--layer-ids: <k> is not a layer: the target has <n> layers, 0 to <last>")
def no_layer(bench):
    return refused(extract.open_target, bench.options(model_path=bench.kimi, layer_ids=[3, 31, 59, 61]))


@produces("--layer-ids: the last id must be the target's last layer, <last>; found <found>")
def not_the_last_layer(bench):
    return refused(extract.open_target, bench.options(model_path=bench.kimi, layer_ids=[2, 30, 57, 58]))


@produces(
    "--max-seq-len <n>: <count> of <all> samples are longer, the longest (<id>) has <tokens> tokens; raise it, or "
    "prepare the data with this length"
)
def too_long(bench):
    return refused(bench.extraction, max_seq_len=55)


@produces("<file>: was changed after it was prepared")
def edited_data(bench):
    path = bench.options().prepared_data
    path.write_text(path.read_text() + "\n")
    return refused(bench.extraction)


@produces("--output-dir <dir>: needs <need> bytes, the disk has <free> free")
def small_disk(bench):
    made = bench.extraction()
    free = shutil.disk_usage(bench.folder).free
    return refused(extract.check_disk, made, [0], reclaimed=-free)  # as if all that is free were taken


@produces("GPU <n>: <free> of <total> GiB are free, --gpu-memory-utilization <share> needs <need>; held by <who>")
def held_gpu(bench):
    holder = SimpleNamespace(pid=os.getpid(), usedGpuMemory=118 * GIB)
    machine = gpus.read_machine(StandIn((140 * GIB, 20 * GIB), processes=[holder]))
    return refused(gpus.check_memory, machine, 2, 0.8, GIB)


@produces("<names> of a run that died still run and hold memory: kill <pids>")
def orphans(bench):
    return refused(preflight._no_leftover_engines, [(1234, "VLLM::EngineCore", ["/sbin/init"])])


@produces("GPU <n>: <size> GiB of weights a rank do not fit into <room> GiB")
def large_weights(bench):
    return refused(gpus.check_memory, gpus.read_machine(StandIn()), 2, 0.9, 540 * 10**9)


@produces("the driver (<version>) runs CUDA up to <driver>, torch was built for <torch>")
def old_driver(bench):
    return refused(gpus.check_driver, gpus.read_machine(StandIn()), "14.0")


@produces("the NVIDIA driver does not answer: <why>")
def no_driver(bench):
    nvml = StandIn()
    nvml.nvmlInit = lambda: (_ for _ in ()).throw(StandIn.NVMLError("Driver Not Loaded"))
    return refused(gpus.read_machine, nvml)


@produces("no nvcc on PATH or in CUDA_HOME")
def no_compiler(bench):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(bench.folder))
        patch.delenv("CUDA_HOME", raising=False)
        return refused(preflight._cuda_compiler)


@produces("<class> in this vLLM has no <method>, and is not of the DeepseekV2 family: newer vLLM")
def no_route(bench):
    models = bench.folder / vllm_source.MODELS
    models.mkdir(parents=True)
    (models / "registry.py").write_text('_M = {"DeepseekV3ForCausalLM": ("deepseek_v2", "DeepseekV3ForCausalLM")}')
    (models / "deepseek_v2.py").write_text(DEEPSEEK)
    return refused(vllm_source.capture_route, "DeepseekV3ForCausalLM", False, bench.folder)


@produces("pipeline parallelism (<n> stages): a stage sees only its own layers")
def pipeline_parallel(bench):
    return refused(capture.check_engine, SimpleNamespace(parallel_config=SimpleNamespace(pipeline_parallel_size=2)))


@produces(
    "--output-dir <dir> holds a set made with other settings: <what> (choose another folder, or --overwrite to "
    "delete it)"
)
def other_set(bench):
    replay.run(bench.extraction())
    return refused(extract.check_folder, bench.extraction(layer_ids=[0, 2, 3, 5]))


@produces("--output-dir <dir>: holds the output of another stage (<stage>); choose another folder")
def another_stages(bench):
    files.write_json(bench.folder / "metadata.json", {"format": prepared.FORMAT})
    return refused(runs.check_output_folder, bench.folder, "extract")


@produces("--output-dir <dir>: has a config.json, so it is a model's folder; choose another folder")
def a_models(bench):
    return refused(runs.check_output_folder, bench.kimi, "train")


@produces("--ray-address <address>: nobody answers there (<why>)")
def no_cluster(bench):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "find_spec", lambda _: True)  # Ray itself is optional
        return refused(cluster.check_address, "127.0.0.1:1")


# Stage 2, while it runs


def flipped_shard(bench: Bench) -> extract.Extraction:
    """A finished set with one byte of its first shard changed."""
    made = bench.extraction()
    replay.run(made)
    raw = bytearray(made.path(0).read_bytes())
    raw[len(raw) // 2] ^= 1
    made.path(0).write_bytes(raw)
    return made


@produces("redoing <shard>: <why>")
def redone(bench):
    made = flipped_shard(bench)
    said = printed(replay.run, made)
    assert shards.verify(made.folder) == []
    return said


@produces("<file>: sample <id> does not match its checksum")
def flipped(bench):
    return "\n".join(shards.verify(flipped_shard(bench).folder))


@produces("the engine stopped; <samples>; its traceback is above")
def dead_engine(bench):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay.Replay, "step", lambda _: (_ for _ in ()).throw(ConnectionError("engine core is dead")))
        return refused(replay.run, bench.extraction())


@produces("stopped on request, and its engine with it; <samples>; the same command goes on")
def stopped_with_its_engine(bench):
    def stop(_):
        signal.raise_signal(signal.SIGTERM)
        raise ConnectionError("engine core is dead")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay.Replay, "step", stop)
        return refused(replay.run, bench.extraction())


@produces("layer <k>: what was captured is not what decoder layer <id> put out")
def wrong_layer(bench):
    class Layer(torch.nn.Module):
        def forward(self, hidden):
            return hidden, torch.zeros_like(hidden)

    decoder = SimpleNamespace(layers=torch.nn.ModuleList(Layer() for _ in range(3)))
    witness = selfcheck.LayerWitness(decoder, [0, 2], compiled=False)
    states = [torch.full((4, 8), float(i)) for i in range(3)]
    for layer, hidden in zip(decoder.layers, states, strict=True):
        layer(hidden)
    (fault,) = witness.faults([states[0], states[1]])
    return fault


@produces(
    "sample <id>: the last captured layer, normed, differs from the target's final hidden row by <x> of its largest "
    "value"
)
def wrong_last_layer(bench):
    tally = selfcheck.Tally()
    selfcheck.compare(tally, ["s0"], torch.ones(1, 8), 2 * torch.ones(1, 8), None, [0])
    return tally.faults[0]


@produces("sample <id>: the captured states are not all finite")
def not_finite(bench):
    made, known = bench.extraction(), replay.random_states(4, 64)
    return refused(replay.run, made, states=lambda name, n: known(name, n) * (float("nan") if name == "s2" else 1))


@produces("<fault> while writing")
def full_disk(bench):
    made = bench.extraction()
    form = shards.ShardFormat(4, 64, torch.float32, made.metadata["shared"])
    writer = shards.ShardWriter(bench.folder, made.content(0), form)
    os.dup2(os.open("/dev/full", os.O_WRONLY), writer._file)
    return refused(writer.write, 0, 0, torch.zeros(1, 4, 64))


# Stage 3


@produces(
    "--hidden-states <dir>: unfinished, it has <n> of <all> shards; run 02_extract_hidden_states.py again with the "
    "same flags, it goes on where it stopped"
)
def unfinished_states(bench):
    folder = bench.states((20, 30, 40, 50))
    shards.shard_paths(folder)[-1].unlink()
    return refused(planned, bench.llama, folder, bench.folder / "run")


@produces(
    "--batch-tokens <n>: <count> of <all> samples are longer, the longest is <id> with <tokens> tokens; give "
    "--batch-tokens <least>"
)
def pack_too_small(bench):
    return refused(planned, bench.llama, bench.states(), bench.folder / "run", batch_tokens=39)


@produces("--hidden-states <dirs>: no sample has two generated tokens in a row to learn from")
def nothing_to_learn(bench):
    samples = [(ids, np.zeros_like(mask), states) for ids, mask, states in random_samples((20, 30, 40), 4, 64, 512)]
    return refused(planned, bench.llama, bench.states(samples=samples), bench.folder / "run", eval_fraction=0)


@produces(
    "--output-dir <dir> holds a run with another <what>; give this run its own folder, or the flags of that one to go "
    "on with it"
)
def other_run(bench):
    states, run = bench.states(), bench.folder / "run"
    with redirect_stdout(io.StringIO()):
        assert train.run_training(planned(bench.llama, states, run, max_steps=1, eval_fraction=0))
    return refused(planned, bench.llama, states, run, max_steps=1, eval_fraction=0, lr=1e-5)


@produces("--hidden-states: part <part> is given, but <k> of <n> parts are trained: part <next> is next")
def out_of_turn(bench):
    return refused(planned, bench.llama, bench.states((20, 30, 40, 50), part=(2, 2)), bench.folder / "run")


@produces("<k> of <n> steps had a gradient that is not finite: the states or the learning rate are bad")
def not_finite_gradients(bench):
    position = train.Position(step=train.MAX_SKIPPED, skipped=train.MAX_SKIPPED + 1)
    trainer = SimpleNamespace(position=position, ranks=SimpleNamespace(say=print))
    with redirect_stdout(io.StringIO()):
        return refused(train.check_skipped, trainer, float("nan"))


@produces("<dir>: the exported draft would not be served: <why>")
def bad_export(bench):
    from eagle3.exported import check_export

    draft = bench.draft()
    config = files.read_json(draft / "config.json")
    files.write_json(draft / "config.json", config | {"eagle_aux_hidden_state_layer_ids": [2, 3, 4, 5]})
    return refused(check_export, draft)


# Stage 4


@produces("<draft>: its <key> is <x>, the target's is <y>")
def draft_of_another(bench):
    draft = bench.draft()
    config = files.read_json(draft / "config.json")
    config.pop("target_fingerprint")  # as in drafts made by others, which say only their sizes
    files.write_json(draft / "config.json", config)
    other = dataclasses.replace(bench.target, text=bench.target.text | {"hidden_size": 128})
    return refused(drafts.check_fit, drafts.open_draft(draft), other)


@produces("--draft <dir>: its target <target> is not there; name it with --model-path")
def moved_target(bench):
    draft = bench.draft()
    config = files.read_json(draft / "config.json")
    config["speculators_config"]["verifier"]["name_or_path"] = "/models/moved"
    files.write_json(draft / "config.json", config)
    prompts = bench.folder / "prompts.jsonl"
    prompts.write_text('{"prompt": "Hello"}\n')
    return said_by("04_evaluate_draft.py", "--draft", draft, "--prompts", prompts)


@produces("WARNING: the draft was trained with --chat-template-kwargs <trained>, not <given>")
def other_mode(bench):
    draft = drafts.open_draft(bench.draft({"thinking": False}))
    return printed(drafts.warn, draft, bench.target, {}, [3])


@produces("acceptance length <x> is below --min-acceptance <least>")
def low_acceptance(bench):
    result = {"benchmarks": {"all": {"acceptance_length": 1.2}}}
    return refused(evaluate.check_acceptance, result, 2.0)
