"""Nothing is lost: extraction killed, filled up, damaged and stopped. The engine is replaced by a replay of known
states (tests/replay.py); the driver, the writer, the files and the resume are the real ones."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest

from eagle3 import engine, extract, files, preflight, prepared, shards, vocab
from eagle3.states import HiddenStates
from eagle3.watch import STATUS
from tests import replay, stages
from tests.test_extract import LAYERS, write_prepared

NUM_SAMPLES = 300


@pytest.fixture(scope="module")
def data(tiny_llama, tmp_path_factory):
    lengths = np.random.default_rng(1).integers(1, 65, NUM_SAMPLES).tolist()
    return write_prepared(tmp_path_factory.mktemp("data") / "prepared", tiny_llama, lengths)


@pytest.fixture
def options(tiny_llama, data, tmp_path):
    """About 10 MB in 11 shards."""
    return extract.Options(
        model_path=tiny_llama, prepared_data=data, output_dir=tmp_path / "states", batch_size=2, max_seq_len=64,
        layer_ids=LAYERS, shard_bytes=1_000_000,
    )  # fmt: skip


@pytest.fixture
def planned(options):
    return extract.plan_extraction(options)


def status(planned) -> dict:
    return files.read_json(planned.folder / STATUS)


def kill_loop(model, data, folder, kills, seed) -> dict:
    command = [sys.executable, "-m", "tests.replay", model, data, folder, str(kills), str(seed)]
    result = subprocess.run(command, cwd=stages.ROOT, text=True, capture_output=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


def test_ten_kills_lose_nothing(tiny_llama, data, tmp_path):
    """SIGKILL at 10 random points (E6, E7): finished shards stay untouched, and the set is bitwise that of an
    uninterrupted run, each sample once."""
    outcome = kill_loop(tiny_llama, data, tmp_path, 10, seed=1)
    assert outcome["kills"] == 10
    assert outcome["built_on"] > 0


@pytest.mark.slow
def test_a_hundred_kills_lose_nothing(tiny_llama, data, tmp_path):
    """The same at 100 random points; between them they meet every state from no shard to all of them."""
    outcome = kill_loop(tiny_llama, data, tmp_path, 100, seed=2)
    assert outcome["kills"] == 100
    assert outcome["built_on"] > outcome["shards"]


def test_damage_is_redone_and_the_rest_untouched(options, planned, tmp_path, capsys):
    """A shard cut by one byte, one emptied, one flipped byte, one of other samples, one of another set, a leftover
    temporary file: each is named and redone, the others keep their inode and time, and the set is bitwise the same
    (E6, E7)."""
    strange = extract.plan_extraction(dataclasses.replace(options, output_dir=tmp_path / "x", layer_ids=[0, 2, 3, 5]))
    replay.run(strange)
    replay.run(planned)
    reference, before = replay.contents(planned.folder), replay.finished(planned.folder)
    cut, emptied, flipped, foreign, other = (planned.path(i) for i in (1, 3, 5, 7, 9))
    cut.write_bytes(cut.read_bytes()[:-1])
    emptied.write_bytes(b"")
    raw = bytearray(flipped.read_bytes())
    raw[len(raw) // 2] ^= 1
    flipped.write_bytes(raw)
    foreign.write_bytes(planned.path(8).read_bytes())
    other.write_bytes(strange.path(9).read_bytes())
    (planned.folder / f".{cut.name}.1234.tmp").write_bytes(b"half")
    damaged = shards.verify(planned.folder)
    replay.run(planned)
    said = capsys.readouterr().out
    assert f"redoing {cut.name}" in said and "not a whole shard" in said
    assert f"redoing {emptied.name}" in said
    assert f"redoing {flipped.name}" in said and "does not match its checksum" in said
    assert f"redoing {foreign.name}" in said and "holds other samples than planned" in said
    assert f"redoing {other.name}" in said and "is of another set: layer_ids: expected [1, 2, 3, 5]" in said
    assert f"removed .{cut.name}.1234.tmp" in said
    kept = set(before) - {cut.name, emptied.name, flipped.name, foreign.name, other.name}
    assert {n: replay.finished(planned.folder)[n] for n in kept} == {n: before[n] for n in kept}
    assert replay.contents(planned.folder) == reference
    redone = sum(len(planned.plan[i]) for i in (1, 3, 5, 7, 9))
    assert (
        f"samples: {redone} written + {NUM_SAMPLES - redone} skipped (finished before) + 0 failed = 300 input" in said
    )
    for name in (cut.name, emptied.name, flipped.name, "1234.tmp"):
        assert any(name in fault for fault in damaged)
    assert any("is there 2 times" in fault for fault in damaged)
    assert shards.verify(planned.folder) == []


@pytest.fixture
def small_disk(tmp_path):
    """A RAM disk of 8 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_disk_that_fills_up(options, small_disk, tmp_path, capsys):
    """Refused before the load when the need is larger than what is free; when another program fills the disk on the
    way, the run fails and says so, no half shard has a final name, and the same command goes on once there is room
    (E8)."""
    planned = extract.plan_extraction(dataclasses.replace(options, output_dir=small_disk))
    with pytest.raises(ValueError, match=r"needs [\d,]+ bytes, the disk has [\d,]+ free"):
        replay.run(planned)
    subprocess.run(["mount", "-o", "remount,size=16m", small_disk], check=True)
    known = replay.random_states(4, 64)
    assert extract.SHARDS_AT_HAND < len(planned.plan) <= 2 * extract.SHARDS_AT_HAND  # so they are made in two halves
    first_of_second = planned.rows[planned.plan[-(-len(planned.plan) // 2)][0]].id

    def fill_then_give(name, tokens):
        if name == first_of_second:
            with pytest.raises(OSError), open(small_disk / "other", "wb", buffering=0) as other:
                while True:
                    other.write(bytes(1 << 16))
        return known(name, tokens)

    with pytest.raises(extract.CaptureFault, match=r"No space left on device.*shard-"):
        replay.run(planned, states=fill_then_give)
    done = replay.finished(small_disk)
    assert 0 < len(done) < len(planned.plan)
    assert all(shards.Shard(p).faults() == [] for p in shards.shard_paths(small_disk))
    assert files.leftovers(small_disk) == []
    (small_disk / "other").unlink()
    replay.run(planned)
    assert done.items() <= replay.finished(small_disk).items()
    assert shards.verify(small_disk) == []
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    table, _ = preflight.examine(dataclasses.replace(options, output_dir=small_disk / "new"))
    assert "is not a folder that this user can write to" in table.refusals[0]


def test_two_runs_into_one_folder(options, planned):
    """While one run holds the folder, the checks of a second name its process, and nothing is deleted (E11)."""
    replay.run(planned)
    with files.locked(planned.folder):
        table, _ = preflight.examine(options, overwrite=True)
    assert table.refusals == [f"--output-dir {planned.folder}: another run writes there (process {os.getpid()})"]
    assert shards.verify(planned.folder) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layer_ids": [0, 2, 3, 5]}, r"shared.layer_ids: expected \[1, 2, 3, 5\], found \[0, 2, 3, 5\]"),
        ({"max_seq_len": 65}, "settings.max_seq_len: expected 64, found 65"),
        ({"storage_dtype": "fp8"}, "shared.storage_dtype: expected 'float32', found 'float8_e4m3fn'"),
    ],
)
def test_other_settings_need_overwrite(options, planned, changes, said):
    """Other layers, length or storage are refused naming key and values; --overwrite makes a new set (E7)."""
    replay.run(planned)
    other = dataclasses.replace(options, **changes)
    table, _ = preflight.examine(other)
    assert len(table.refusals) == 1
    with pytest.raises(ValueError, match=said):
        replay.run(extract.plan_extraction(other))
    assert shards.verify(planned.folder) == []
    replay.run(extract.plan_extraction(other), overwrite=True)
    assert shards.verify(planned.folder) == []
    assert shards.ShardSet(planned.folder).shared["layer_ids"] == (other.layer_ids)


def test_another_model_is_refused(options, planned, tiny_llama, tmp_path):
    """The same data through a target with another config does not go into the folder of the first (E7)."""
    replay.run(planned)
    model = tmp_path / "model"
    shutil.copytree(tiny_llama, model)
    files.write_json(model / "config.json", files.read_json(model / "config.json") | {"rms_norm_eps": 1e-6})
    data = write_prepared(tmp_path / "prepared", model, [8])
    other = extract.plan_extraction(dataclasses.replace(options, model_path=model, prepared_data=data))
    with pytest.raises(ValueError, match=r"holds a set made with other settings: shared.target.config: expected"):
        replay.run(other)


def test_sigterm_finishes_the_shards_at_hand(planned, capsys):
    """After SIGTERM no new shard is begun, those begun are finished, the log says how to go on, and the same command
    completes the set."""
    known, sent = replay.random_states(4, 64), []

    def stop_at_the_hundredth(name, tokens):
        if name == "s100" and not sent:
            sent.append(os.kill(os.getpid(), signal.SIGTERM))
        return known(name, tokens)

    with pytest.raises(InterruptedError, match=r"stopped on request: \d+ shards to do; the same command goes on"):
        replay.run(planned, states=stop_at_the_hundredth)
    said = capsys.readouterr().out
    assert "stopping: finishing the shards at hand" in said
    done = replay.finished(planned.folder)
    assert 0 < len(done) < len(planned.plan)
    assert files.leftovers(planned.folder) == []
    assert status(planned)["state"] == "stopped"
    replay.run(planned)
    assert done.items() <= replay.finished(planned.folder).items()
    assert shards.verify(planned.folder) == []


def test_sigterm_to_the_engine_as_well_is_a_stop(planned, monkeypatch, capfd):
    """A scheduler sends SIGTERM to every process of a run, which ends vLLM's engine at once: stopped, not failed; the
    samples in flight are named, and the same command completes the set."""
    step, steps = replay.Replay.step, []

    def stop_at_the_tenth(self):
        steps.append(1)
        if len(steps) == 10:
            os.kill(os.getpid(), signal.SIGTERM)
            raise ConnectionError("the engine core is dead")
        return step(self)

    monkeypatch.setattr(replay.Replay, "step", stop_at_the_tenth)
    with pytest.raises(InterruptedError, match=r"stopped on request, and its engine with it; \d+ samples .*; the same"):
        replay.run(planned)
    assert status(planned)["state"] == "stopped"
    assert "ConnectionError: the engine core is dead" in capfd.readouterr().err
    monkeypatch.undo()
    replay.run(planned)
    assert shards.verify(planned.folder) == []


def test_ctrl_c_ends_the_start_of_an_engine():
    """vLLM's context managers swallow a KeyboardInterrupt while an engine starts: it arrives all the same, and where
    Ctrl-C is ignored, as in a shell's background job, it stays so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), engine._interruptible(), suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with engine._interruptible():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_stage_1_says_of_the_same_data_may_change(options, planned, tmp_path):
    """A renamed input, another draft vocabulary: no state depends on them, so a finished set is kept, and the new
    vocabulary goes along."""
    replay.run(planned)
    before, folder = replay.finished(planned.folder), tmp_path / "prepared"
    shutil.copytree(options.prepared_data.parent, folder)
    metadata = files.read_json(folder / prepared.METADATA)
    vocab.DraftVocab(planned.target.vocab_size, np.arange(100)).save(folder)
    again = {k: v for k, v in metadata.items() if k != "format" and k not in prepared.HASHED}
    prepared.write_metadata(folder, again | {"inputs": ["renamed.jsonl"]})
    replay.run(extract.plan_extraction(dataclasses.replace(options, prepared_data=folder / prepared.DATA)))
    assert replay.finished(planned.folder) == before
    assert vocab.DraftVocab.load(planned.folder).size == 100
    assert shards.verify(planned.folder) == []


def test_files_that_are_no_shards_of_the_set_are_refused(planned):
    """A copy under a further number, a folder under a shard's name: named, nothing deleted. Stage 3 refuses them."""
    replay.run(planned)
    further = planned.path(len(planned.plan))
    shutil.copy(planned.path(3), further)
    with pytest.raises(ValueError, match=f"{further}: is no shard of this set"):
        replay.run(planned)
    further.unlink()
    planned.path(3).unlink()
    planned.path(3).mkdir()
    with pytest.raises(ValueError, match=f"{planned.path(3)}: is no shard of this set"):
        replay.run(planned)
    with pytest.raises(ValueError, match=f"{planned.path(3)}: is a folder, not a shard"):
        replay.run(planned, overwrite=True)
    assert len(shards.shard_paths(planned.folder)) == len(planned.plan)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (
            "shared",
            {"layer_ids": [0]},
            "does not belong with metadata.json: layer_ids: expected [0], found [1, 2, 3, 5]",
        ),
        ("shared", None, "has 'shared': None"),
        ("prepared", None, "has 'prepared': None"),
        ("settings", [], "has 'settings': []"),
        ("num_shards", "14", "has 'num_shards': '14'"),
        ("num_samples", "300", "has 'num_samples': '300'"),
        ("num_tokens", 1, "expected 1 tokens, found"),
        ("settings", {"part": 5}, "has a part that is none: expected I/N, such as 1/4 to 4/4, found 5"),
        ("settings", {"part": "9/2"}, "has a part that is none: expected I/N, such as 1/4 to 4/4, found 9/2"),
        ("prepared", {"settings": []}, "has 'settings': []"),
    ],
)
def test_metadata_that_the_shards_contradict_is_found(planned, key, value, said):
    """`verify` holds metadata.json against the shards, and lists it beside what else is wrong."""
    replay.run(planned)
    path = planned.folder / shards.METADATA
    files.write_json(path, files.read_json(path) | {key: value})
    if f"'{key}'" in said:
        with pytest.raises(ValueError, match="metadata.json: has"):
            HiddenStates.open(planned.folder, planned.target)
    (planned.folder / ".x.1.tmp").touch()
    faults = shards.verify(planned.folder)
    assert len(faults) == 2 and ".x.1.tmp" in faults[0] and said in faults[1]


def test_shards_that_changed_places_and_a_foreign_vocabulary_are_found(planned):
    """Two shards under each other's names; a sound draft vocabulary that is not the one of the prepared data."""
    replay.run(planned)
    first, second = planned.path(1), planned.path(2)
    first.rename(planned.folder / "kept")
    second.rename(first)
    (planned.folder / "kept").rename(second)
    assert shards.verify(planned.folder) == [
        f"{first}: is {second.name} by its header",
        f"{second}: is {first.name} by its header",
    ]
    replay.run(planned)
    vocab.DraftVocab(planned.target.vocab_size, np.arange(7)).save(planned.folder)
    (fault,) = shards.verify(planned.folder)
    assert "draft_vocab.json: is not the one of the prepared data" in fault
    with pytest.raises(ValueError, match=r"draft_vocab.json: is not the one of the prepared data"):
        HiddenStates.open(planned.folder, planned.target)


def test_states_that_are_not_finite_stop_the_run(planned, capfd):
    """A NaN names its sample, the log has the writer's traceback, the counts add up, status.json says failed."""
    known = replay.random_states(4, 64)
    with pytest.raises(extract.CaptureFault, match=r"sample 's150': the captured states are not all finite"):
        replay.run(planned, states=lambda name, n: known(name, n) * (float("nan") if name == "s150" else 1))
    log = capfd.readouterr()
    assert "Traceback (most recent call last)" in log.err and "s150" in log.err
    found = status(planned)
    samples = found["samples"]
    assert found["state"] == "failed" and "s150" in found["last_error"]
    assert samples["written"] + samples["skipped"] + samples["failed"] == samples["input"] == NUM_SAMPLES
    assert samples["failed"] >= 1
    assert all(shards.Shard(p).faults() == [] for p in shards.shard_paths(planned.folder))


def test_a_dead_engine_names_the_samples_in_flight(planned, monkeypatch):
    """When the engine is gone, the error names what was in it, the state is failed, and nothing hangs."""
    step, steps = replay.Replay.step, []

    def die_at_the_tenth(self):
        steps.append(1)
        if len(steps) == 10:
            raise ConnectionError("the engine core is dead")
        return step(self)

    monkeypatch.setattr(replay.Replay, "step", die_at_the_tenth)
    with pytest.raises(RuntimeError, match=r"the engine stopped; \d+ samples were in flight: s\d+, s\d+.*is above"):
        replay.run(planned)
    assert "in flight" in status(planned)["last_error"]
    monkeypatch.undo()
    replay.run(planned)
    assert shards.verify(planned.folder) == []


def test_no_call_waits_for_a_dead_engine():
    """vLLM's own calls never return once the engine's process is gone; ours end with an error, for a call to the
    workers and for a step alike, once vLLM's monitor has seen the death."""

    def never(*_args, **_kwargs):
        threading.Event().wait()

    resources = SimpleNamespace(engine_dead=False)
    core = SimpleNamespace(resources=resources)
    llm_engine = SimpleNamespace(engine_core=core, step=never, has_unfinished_requests=lambda: True)
    llm = SimpleNamespace(collective_rpc=never, llm_engine=llm_engine)
    threading.Timer(0.5, lambda: setattr(resources, "engine_dead", True)).start()
    with pytest.raises(RuntimeError, match="the engine's process ended before it answered capture_status"):
        engine.call_workers(llm, "capture_status")
    with pytest.raises(RuntimeError, match="the engine's process ended before it answered a step"):
        list(engine.steps(llm, [], 1))


def test_an_engine_is_given_time_to_end():
    """vLLM's own 5 s end an engine before it has given back its shared memory; a vLLM whose call takes no time (0.16)
    is stopped all the same."""
    given = []

    class New:
        def shutdown(self, timeout: float | None = None) -> None:
            given.append(timeout)

    class Old:
        def shutdown(self) -> None:
            given.append("old")

    for core in (New(), Old()):
        engine.stop(SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core)))
    assert given == [engine.STOP_S, "old"] and engine.STOP_S > 5


def test_a_log_line_and_the_status_say_how_far_it_is(planned, monkeypatch, capsys):
    """Samples and tokens done of all, rates, GB, and time left: in the log's line and in status.json (E11)."""
    monkeypatch.setattr("eagle3.progress.EVERY_S", 0)
    monkeypatch.setattr("eagle3.status.EVERY_S", 0)
    seen = []
    known = replay.random_states(4, 64)

    def look(name, tokens):
        if name == "s250":
            seen.append(status(planned))
        return known(name, tokens)

    replay.run(planned, states=look, step_s=0.01)
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("extract ") and "250/300" in x)
    for part in (f"/{planned.num_tokens:,} tokens", "tokens/s", "ETA 0:00:", "samples", " GB ", "GB/s"):
        assert part in line
    halfway = seen[0]
    assert halfway["state"] == "extracting"
    assert 0 < halfway["samples"]["done"] < 300 == halfway["samples"]["input"]
    assert 0 < halfway["tokens"]["done"] < halfway["tokens"]["input"] == planned.num_tokens
    assert halfway["tokens_per_s"] > 0 and halfway["eta_s"] > 0 and halfway["process"] == os.getpid()
    end = status(planned)
    assert end["state"] == "done"
    assert end["samples"] == {"input": 300, "skipped": 0, "written": 300, "failed": 0, "done": 300}
    assert end["gb_written"] == pytest.approx(planned.num_tokens * planned.token_bytes / 1e9)


def test_parts_are_disjoint_and_together_all(options, capsys):
    """--part 1/3, 2/3 and 3/3: each in its own folder, metadata says which, together every sample once."""
    names = []
    for index in (1, 2, 3):
        planned = extract.plan_extraction(dataclasses.replace(options, part=(index, 3)))
        replay.run(planned)
        assert planned.folder == options.output_dir / f"part-0000{index}-of-00003"
        assert files.read_json(planned.folder / shards.METADATA)["settings"]["part"] == f"{index}/3"
        assert shards.verify(planned.folder) == []
        names += shards.ShardSet(planned.folder).sample_ids
    assert sorted(names) == sorted(f"s{i}" for i in range(NUM_SAMPLES))
    with pytest.raises(ValueError, match="--part 400/400: holds no samples"):
        extract.plan_extraction(dataclasses.replace(options, part=(400, 400)))


def test_the_command_line_verifies_and_shows(planned):
    """`verify` exits 0 on a sound set and 1 naming what is wrong; `show` says what is there."""
    replay.run(planned)
    code, said = stages.run_here("eagle3.shards", "verify", planned.folder)
    assert code == 0 and "sound, 300 samples" in said
    code, shown = stages.run_here("eagle3.shards", "show", planned.folder)
    assert code == 0
    for part in (
        f"{len(planned.plan)}, 0.010 GB",
        f"{planned.num_tokens:,}, ",
        "[1, 2, 3, 5]",
        '"float32"',
        "of 1 to 64",
    ):
        assert part in shown
    words = planned.folder / "draft_vocab.json"
    whole = words.read_text()
    words.write_text(whole[:-9])
    code, said = stages.run_here("eagle3.shards", "verify", planned.folder)
    assert code == 1 and said.startswith(f"{words}: not valid JSON")
    words.unlink()
    code, said = stages.run_here("eagle3.shards", "verify", planned.folder)
    assert (code, said) == (1, f"{words}: missing\n")
    words.write_text(whole)
    planned.path(2).unlink()
    code, said = stages.run_here("eagle3.shards", "verify", planned.folder)
    lost = len(planned.plan[2])
    assert code == 1
    assert said.splitlines() == [
        f"{planned.path(2)}: missing",
        f"{planned.folder}: expected 300 samples, found {300 - lost}",
        f"{planned.folder}: expected 10,014 tokens, found {10_014 - planned.tokens_of([2]):,}",
    ]
