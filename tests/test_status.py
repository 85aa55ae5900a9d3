"""What a stage says of itself while it runs, and what `python -m eagle3.status` makes of it."""

import os
import signal
import socket
import subprocess
import sys
import time
from datetime import datetime, timedelta

import pytest

from eagle3 import cli, files, runs, status
from eagle3.progress import Progress
from eagle3.status import Counted, Status
from tests import stages

NOW = datetime.now().astimezone()


def row(folder, stage):
    return next(r for r in status.rows(folder) if r.stage == stage)


def written(path, **changes):
    """A status file of stage 1 at 30 of 120 KiB, of this process."""
    content = {
        "stage": "prepare", "state": "running", "doing": "prepare", "unit": "KiB", "KiB": {"input": 120, "done": 30},
        "KiB_per_s": 2.0, "eta_s": 45.0, "last_error": None, "process": os.getpid(), "host": socket.gethostname(),
        "updated": NOW.isoformat(timespec="seconds"),
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(path, content | changes)


def test_a_stage_that_runs_shows_progress_rate_and_time_left(tmp_path):
    """30 of 120 KiB at 2 KiB/s: 25%, 45 seconds to go."""
    written(tmp_path / "prepared" / "status.json")
    found = row(tmp_path, "prepare")
    assert (found.state, found.progress, found.rate, found.eta) == (
        "running", "30 of 120 KiB (25%)", "2.0 KiB/s", "0:00:45",
    )  # fmt: skip
    assert found.notes == (f"prepare, process {os.getpid()}",) and found.where == "prepared"


def test_every_progress_of_the_stage_reaches_its_file(tmp_path, monkeypatch):
    """The file says what the bar or the log says, after each piece of work that is old enough, and at the end."""
    monkeypatch.setattr("eagle3.status.EVERY_S", 0)
    path = tmp_path / "status.json"
    with Status(path, "evaluate"), Progress("with the draft", 4, "prompts") as progress:
        assert files.read_json(path)["state"] == "running" and "unit" not in files.read_json(path)
        progress.update(3)
        found = files.read_json(path)
        assert (found["unit"], found["prompts"]) == ("prompts", {"input": 4, "done": 3})
        assert found["prompts_per_s"] > 0 and found["eta_s"] > 0 and found["doing"] == "with the draft"
        progress.update(1)
    assert files.read_json(path)["state"] == "done" and files.read_json(path)["prompts"]["done"] == 4
    progress.update(1)
    assert files.read_json(path)["prompts"]["done"] == 4


@pytest.mark.parametrize(
    ("error", "state"),
    [(ValueError("a bad row"), "failed"), (KeyboardInterrupt(), "stopped"), (InterruptedError("stop"), "stopped")],
)
def test_the_last_state_says_how_the_stage_ended(tmp_path, error, state):
    """An error is failed, a request to stop is stopped; both with what was said, which the table shows."""
    with pytest.raises(type(error)), Status(tmp_path / "prepared" / "status.json", "prepare"):
        raise error
    found = row(tmp_path, "prepare")
    assert found.state == state
    assert found.notes == (f"{type(error).__name__}: {error}".strip() if str(error) else f"{type(error).__name__}: ",)


def test_a_process_that_was_killed_is_told(tmp_path):
    """kill -9 leaves `running` in the file, of a process that is gone: killed, with where to go on."""
    code = (
        "import sys, time; from pathlib import Path; from eagle3.status import Status\n"
        "with Status(Path(sys.argv[1]), 'prepare'): print('up', flush=True); time.sleep(60)"
    )
    path = tmp_path / "prepared" / "status.json"
    process = subprocess.Popen([sys.executable, "-c", code, path], cwd=stages.ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "up\n"
    assert row(tmp_path, "prepare").state == "running"
    process.send_signal(signal.SIGKILL)
    time.sleep(0.3)  # a zombie until its parent looks: gone all the same
    assert row(tmp_path, "prepare").state == "killed"
    process.wait()
    found = row(tmp_path, "prepare")
    assert found.state == "killed" and f"process {process.pid} is gone" in found.notes[0]


def test_another_process_with_the_same_number_is_not_taken_for_it(tmp_path):
    """This process began after the file was last written, so the one that wrote it is gone."""
    written(tmp_path / "prepared" / "status.json", updated=(NOW - timedelta(days=1)).isoformat())
    found = row(tmp_path, "prepare")
    assert found.state == "killed" and found.updated == "1 d ago"


def test_a_process_of_another_machine_is_not_judged(tmp_path):
    """It is called running, and the machine is named."""
    written(tmp_path / "prepared" / "status.json", host="gpu7", process=2)
    found = row(tmp_path, "prepare")
    assert found.state == "running" and "on gpu7" in found.notes[0]


def test_a_run_shows_all_stages_and_a_stages_folder_itself(finished_run):
    """Each stage with what it came to; what has not begun is said, but not for the folder of one stage."""
    found = {r.stage: r for r in status.rows(finished_run)}
    assert [*found] == list(cli.STAGES)
    assert {s: r.state for s, r in found.items()} == {
        "generate": "not begun", "prepare": "done", "extract": "done", "train": "done", "evaluate": "done",
    }  # fmt: skip
    assert found["train"].progress == "10 of 10 steps (100%)" and "estimated acceptance" in found["train"].notes[-1]
    assert "2 of 5 rows kept" in found["prepare"].notes[-1]
    assert "acceptance length 1.71, speed-up 2.00x, 3 of 4 answers identical" in found["evaluate"].notes
    assert [r.stage for r in status.rows(finished_run / "hidden_states")] == ["extract"]


def test_outputs_without_a_status_file_are_known_by_their_formats(finished_run, tmp_path):
    """A finished preparation is done; an extraction that lacks shards is begun, and nobody knows by whom."""
    for name in ("prepared", "hidden_states"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metadata.json").write_bytes((finished_run / name / "metadata.json").read_bytes())
    assert row(tmp_path, "prepare").state == "done"
    assert row(tmp_path, "extract").state == "unknown"
    assert row(tmp_path, "train").state == "not begun"


def test_a_broken_file_is_a_row_of_its_own(tmp_path):
    """The fault and the file are in the table, and the other stages are there too."""
    written(tmp_path / "prepared" / "status.json", updated="yesterday")
    found = row(tmp_path, "prepare")
    assert found.state == "broken" and "prepared/status.json" in found.notes[0]


def test_an_evaluation_of_an_earlier_format_is_named_as_one(tmp_path):
    """Not as one that lacks an entry: nothing was damaged."""
    files.write_json(tmp_path / "evaluation.json", {"format": "eagle3-evaluation/1"})
    found = row(tmp_path, "evaluate")
    assert found.state == "broken" and "found 'eagle3-evaluation/1'; 04_evaluate_draft.py" in found.notes[0]


def test_a_file_of_a_stages_name_that_is_no_object_is_refused(tmp_path):
    """A list where an object should be: the file and both kinds, exit code 2."""
    (tmp_path / "status.json").write_text("[1, 2]")
    result = stages.run("-m", "eagle3.status", tmp_path)
    assert result.returncode == 2
    assert f"{tmp_path / 'status.json'}: expected a JSON object, found list" in result.stdout


def test_parts_of_an_extraction_are_a_row_each(tmp_path):
    """hidden_states/part-00001-of-00002 and part-00002-of-00002 are two rows of the run."""
    for part in ("part-00001-of-00002", "part-00002-of-00002"):
        with Status(tmp_path / "hidden_states" / part / runs.STATUS, "extract", "loading") as kept:
            kept.work = Counted("extract", "tokens", 5, 10, 1.0, 5.0)
    found = [r for r in status.rows(tmp_path) if r.stage == "extract"]
    assert [(r.where, r.progress) for r in found] == [
        (f"hidden_states/part-0000{k}-of-00002", "5 of 10 tokens (50%)") for k in (1, 2)
    ]


def test_the_command_is_quick_and_refuses_what_is_no_folder(finished_run):
    """Under half a second of processor time, since torch stays out of it; exit code 2 for a folder that is not."""
    before = os.times()
    result = stages.run("-m", "eagle3.status", finished_run)
    after = os.times()
    assert result.returncode == 0 and "10 of 10 steps (100%)" in result.stdout, result.stdout
    assert after.children_user + after.children_system - before.children_user - before.children_system < 0.5
    result = stages.run("-m", "eagle3.status", finished_run / "none")
    assert result.returncode == 2 and result.stdout.endswith("none: no such folder\n")


def test_the_table_lines_up(tmp_path):
    """A head, a line for each stage, notes under their stage."""
    written(tmp_path / "prepared" / "status.json")
    lines = list(status.table(tmp_path))
    assert lines[0] == str(tmp_path) and lines[1].split() == [
        "stage",
        "state",
        "progress",
        "rate",
        "ETA",
        "updated",
        "where",
    ]
    assert lines[3].startswith("  prepare   running") and lines[4].strip().startswith("prepare, process")
    assert len(lines) == 2 + len(cli.STAGES) + 1
