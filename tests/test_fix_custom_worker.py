"""fix_custom_worker.py on the files that the wheels of speculators carry: all or nothing, and back to the byte.

What the repaired files do on vLLM 0.16 is shown by tests/legacy (`make test-legacy`).
"""

import ast
import importlib.machinery
import importlib.util
import math
import os
import py_compile
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from speculators_wheels import unpack

import fix_custom_worker as fix

VERSIONS = ("0.3.0", "0.4.0")
FILES = (fix.WORKER, fix.GENERATOR)
SCRIPT = Path(fix.__file__)
LAYER_CALL = next(repair for repair in fix.REPAIRS if repair.name == "layer call").shipped["0.3.0"]


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """shipped[version]: the wheel unpacked; read only."""
    root = tmp_path_factory.mktemp("shipped")
    return {version: unpack(version, root / version) for version in (*VERSIONS, "0.5.0")}


@pytest.fixture
def site_of(shipped, tmp_path):
    """site_of(version): a fresh site-packages folder with that speculators in it."""
    return lambda version, name="site": Path(shutil.copytree(shipped[version], tmp_path / name))


@pytest.fixture(params=VERSIONS)
def site(request, site_of):
    return site_of(request.param)


def folder(site: Path) -> Path:
    return site / "speculators" / "data_generation"


def contents(site: Path) -> dict:
    """Path -> bytes of all files beside the two, bytecode aside."""
    return {path.name: path.read_bytes() for path in folder(site).iterdir() if path.is_file()}


def run(site: Path, *arguments: str) -> int:
    return fix.main([*arguments, "--site", str(site)])


def repaired_contents(site: Path, tmp_path: Path) -> dict:
    """What --apply makes of a copy of the site."""
    copy = Path(shutil.copytree(site, tmp_path / "copy"))
    assert run(copy, "--apply") == fix.FINE
    return contents(copy)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("file", FILES)
def test_every_place_is_found_exactly_once_before_and_after(shipped, version, file):
    """shipped text once and repaired text never in the wheel's file; the other way round in the result; and undone."""
    source = (folder(shipped[version]) / file).read_text()
    assert fix.sha256(source) == fix.SHIPPED_SHA256[version, file]
    repairs = fix.repairs_of(file, version)
    assert len(repairs) == len({repair.name for repair in repairs}) > 5
    assert [(source.count(r.shipped[version]), source.count(r.repaired)) for r in repairs] == [(1, 0)] * len(repairs)
    repaired = fix.repair_source(source, file, version)
    assert [(repaired.count(r.shipped[version]), repaired.count(r.repaired)) for r in repairs] == [(0, 1)] * len(
        repairs
    )
    assert fix.repair_source(repaired, file, version) == repaired
    assert fix.undo_source(repaired, file, version) == source
    ast.parse(repaired)


def test_check_says_what_is_there_and_writes_nothing(site, capsys):
    """The default action; exit 1 before the patch, 0 after it."""
    before = contents(site)
    assert run(site) == fix.NEEDS_PATCH
    out = capsys.readouterr().out
    assert "custom_worker.py: original (0." in out and "vllm_hidden_states_generator.py: original (0." in out
    assert "foreign" not in out and "--apply" in out
    assert contents(site) == before
    run(site, "--apply")
    capsys.readouterr()
    assert run(site, "--check") == fix.FINE
    assert f"custom_worker.py: repaired, revision {fix.REVISION}\n" in capsys.readouterr().out


def test_diff_shows_the_change_and_writes_nothing(site_of, capsys):
    """A unified diff: both sides of a known line; empty once applied."""
    site = site_of("0.3.0")
    before = contents(site)
    assert run(site, "--diff") == fix.NEEDS_PATCH
    lines = capsys.readouterr().out.splitlines()
    assert "-            else self.get_input_embeddings(input_ids)" in lines
    assert "+            else self.embed_input_ids(input_ids)" in lines
    assert contents(site) == before
    run(site, "--apply")
    capsys.readouterr()
    assert run(site, "--diff") == fix.FINE
    assert capsys.readouterr().out == ""


def test_apply_again_changes_nothing_and_revert_restores_the_bytes(site):
    """Apply twice: the same files, not written again. Revert: the folder as the wheel left it."""
    before = contents(site)
    assert run(site, "--apply") == fix.FINE
    first = contents(site)
    times = {name: (folder(site) / name).stat().st_mtime_ns for name in FILES}
    assert {name: first[f"{name}.before-repair"] for name in FILES} == {name: before[name] for name in FILES}
    assert run(site, "--apply") == fix.FINE
    assert contents(site) == first
    assert {name: (folder(site) / name).stat().st_mtime_ns for name in FILES} == times
    assert run(site, "--revert") == fix.FINE
    assert contents(site) == before
    assert run(site, "--revert") == fix.FINE


def test_a_place_edited_by_hand_is_named_and_nothing_is_written(site_of, capsys):
    """Somebody repaired error 2 by himself: file, line, expected and found; exit 2 from check, diff and apply."""
    site = site_of("0.3.0")
    path = folder(site) / fix.GENERATOR
    old = "                max_num_batched_tokens=max_num_batched_tokens,\n            ),\n"
    new = old.replace("            ),", "                is_encoder_decoder=False,\n            ),")
    source = path.read_text()
    assert source.count(old) == 1
    path.write_text(source.replace(old, new))
    before = contents(site)
    for action in ("--check", "--diff", "--apply"):
        assert run(site, action) == fix.CANNOT
        err = capsys.readouterr().err
        line = source[: source.index(old)].count("\n") + 1
        assert f"{fix.GENERATOR}, line {line}, 'scheduler config': changed by someone else" in err
        assert "    +                 is_encoder_decoder=False," in err
        assert contents(site) == before


def test_an_edit_elsewhere_is_kept(site, capsys):
    """A log line added outside our places: applied, reported, and there again, to the byte, after revert."""
    path = folder(site) / fix.GENERATOR
    path.write_text(path.read_text().replace("import torch\n", "import torch\nprint('mine')\n", 1))
    before = contents(site)
    assert run(site, "--apply") == fix.FINE
    assert "print('mine')" in path.read_text()
    capsys.readouterr()
    assert run(site) == fix.FINE
    assert "with edits elsewhere that stay" in capsys.readouterr().out
    assert run(site, "--revert") == fix.FINE
    assert contents(site) == before


def test_a_place_edited_after_the_repair_stops_the_revert(site, capsys):
    """Revert can't undo what it does not know: it names the place and the backup and leaves both files alone."""
    run(site, "--apply")
    path = folder(site) / fix.WORKER
    path.write_text(path.read_text().replace("_num_scheduled_tokens = None  # request", "_num = None  # request"))
    before = contents(site)
    capsys.readouterr()
    assert run(site, "--revert") == fix.CANNOT
    err = capsys.readouterr().err
    assert "'layer order': changed by someone else" in err and f"{fix.WORKER}.before-repair" in err
    assert contents(site) == before


@pytest.mark.parametrize("half", ["one file of two", "some places of a file"])
def test_a_half_applied_state_is_completed(site_of, tmp_path, capsys, half):
    """A run killed between two renames, or a repair copied by hand: check says so, apply ends like a whole one."""
    site = site_of("0.3.0")
    before, whole = contents(site), repaired_contents(site, tmp_path)
    worker = folder(site) / fix.WORKER
    if half == "one file of two":
        worker.write_bytes(whole[fix.WORKER])
    else:
        repair = next(repair for repair in fix.REPAIRS if repair.name == "embed method")
        worker.write_text(worker.read_text().replace(repair.shipped["0.3.0"], repair.repaired))
    assert run(site) == fix.NEEDS_PATCH
    assert (half == "one file of two") != ("custom_worker.py: half repaired (0.3.0)" in capsys.readouterr().out)
    assert run(site, "--apply") == fix.FINE
    assert {name: contents(site)[name] for name in FILES} == {name: whole[name] for name in FILES}
    assert run(site, "--revert") == fix.FINE
    assert contents(site) == before


def test_crlf_files_keep_their_line_ends(site, tmp_path):
    """Repaired with CRLF throughout, the same text otherwise, and back to the byte."""
    whole = repaired_contents(site, tmp_path)
    for name in FILES:
        path = folder(site) / name
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    before = contents(site)
    assert run(site, "--apply") == fix.FINE
    for name in FILES:
        assert contents(site)[name] == whole[name].replace(b"\n", b"\r\n")
    assert run(site, "--revert") == fix.FINE
    assert contents(site) == before


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(b"\r\n" + path.read_bytes()), "some lines end with CRLF and some with LF"),
        (lambda path: path.write_bytes(path.read_bytes() + b"# \xff\n"), "not UTF-8 at byte"),
        (lambda path: path.unlink(), "is missing (interrupted install?)"),
        (lambda path: path.write_text("x = 1\n"), "none of the places to repair is in it"),
        (lambda path: path.write_text(path.read_text() + LAYER_CALL), "is there 2 times, expected once"),
        (lambda path: path.write_text(path.read_text() + "def (\n"), "not Python once repaired"),
    ],
)
def test_a_damaged_file_is_refused_by_name(site, capsys, damage, message):
    """Exit 2, the file in the text, and the other file untouched."""
    damage(folder(site) / fix.WORKER)
    before = contents(site)
    assert run(site, "--apply") == fix.CANNOT
    err = capsys.readouterr().err
    assert message in err and fix.WORKER in err
    assert contents(site) == before


def test_files_of_two_versions_are_refused(site_of, capsys):
    """0.3.0's generator beside 0.4.0's worker, as an interrupted upgrade leaves them."""
    site = site_of("0.3.0")
    shutil.copy(folder(site_of("0.4.0", "other")) / fix.WORKER, folder(site))
    assert run(site, "--apply") == fix.CANNOT
    assert "mixes two versions of speculators" in capsys.readouterr().err


def test_speculators_without_the_generator_is_sent_elsewhere(site_of, capsys):
    """0.5.0 dropped it: exit 2 and what to do instead."""
    assert run(site_of("0.5.0")) == fix.CANNOT
    err = capsys.readouterr().err
    assert "speculators 0.5.0" in err and "02_extract_hidden_states.py" in err and "speculators 0.9" in err


def as_another_user(action) -> tuple[int, str]:
    """Run action() in a child that is not root, and may write only where everybody may; its exit code and stderr."""
    with tempfile.TemporaryFile("w+") as log:
        child = os.fork()
        if child == 0:
            code = 99
            try:
                os.dup2(log.fileno(), 2)
                sys.stderr = os.fdopen(2, "w", closefd=False)
                if os.getuid() == 0:
                    os.setgid(65534)
                    os.setuid(65534)
                code = action()
                sys.stderr.flush()
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        log.seek(0)
        return os.waitstatus_to_exitcode(status), log.read()


def test_a_read_only_folder_is_refused_and_left_as_it_was(shipped):
    """Exit 2 with the reason; --check works there."""
    with tempfile.TemporaryDirectory() as root:
        os.chmod(root, 0o755)
        site = Path(shutil.copytree(shipped["0.3.0"], Path(root, "site")))
        os.chmod(folder(site), 0o555)
        before = contents(site)
        code, err = as_another_user(lambda: run(site, "--apply"))
        assert code == fix.CANNOT, err
        assert "can't write" in err and "Nothing was changed" in err
        assert as_another_user(lambda: run(site, "--check"))[0] == fix.NEEDS_PATCH
        assert contents(site) == before
        os.chmod(folder(site), 0o755)


def test_a_write_that_fails_half_way_is_rolled_back(site, capsys):
    """A folder where the second backup should go: the first file, replaced by then, is put back."""
    (folder(site) / f"{fix.GENERATOR}.before-repair").mkdir()
    before = contents(site)
    assert run(site, "--apply") == fix.CANNOT
    assert "Nothing was changed" in capsys.readouterr().err
    assert contents(site) == before


def test_many_at_once_end_like_one(site, tmp_path):
    """Eight processes apply at the same time (a launcher on each rank): all exit 0, one result, nothing left over."""
    whole = repaired_contents(site, tmp_path)
    command = [sys.executable, str(SCRIPT), "--apply", "--site", str(site)]
    with ThreadPoolExecutor(8) as pool:
        codes = list(pool.map(lambda _: subprocess.run(command, capture_output=True).returncode, range(8)))
    assert codes == [0] * 8
    assert contents(site) == whole


def test_bytecode_that_python_would_not_check_is_dropped(site_of, capsys):
    """Compiled with unchecked hashes, as some images are, the old code would run for ever."""
    site = site_of("0.3.0")
    path = folder(site) / fix.WORKER
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(path), invalidation_mode=unchecked)

    def names():
        loader = importlib.machinery.SourceFileLoader("worker", str(path))
        return {name for code in (loader.get_code("worker"),) for name in code.co_names}

    assert "supports_eagle3" in names()
    old = Path(importlib.util.cache_from_source(str(path))).read_bytes()
    assert run(site, "--apply") == fix.FINE
    assert "supports_eagle3" not in names() and "_proving_forward" in names()
    # the same, found later: put back by a tool that restores caches
    Path(importlib.util.cache_from_source(str(path))).write_bytes(old)
    capsys.readouterr()
    assert run(site) == fix.NEEDS_PATCH
    assert "stale bytecode" in capsys.readouterr().out
    assert run(site, "--apply") == fix.FINE
    assert "_proving_forward" in names()


def test_another_revision_is_replaced_from_its_backup(site, tmp_path, capsys):
    """A repair of revision 0 is told apart and becomes this revision; without its backup it is refused."""
    whole = repaired_contents(site, tmp_path)
    run(site, "--apply")
    for name in FILES:
        path = folder(site) / name
        path.write_text(
            path.read_text().replace(fix.MARKER, fix.MARKER.replace(f"revision {fix.REVISION}", "revision 0"))
        )
    capsys.readouterr()
    assert run(site) == fix.NEEDS_PATCH
    assert "repaired by another revision (0; this file is revision" in capsys.readouterr().out
    backup = folder(site) / f"{fix.WORKER}.before-repair"
    saved = backup.read_bytes()
    backup.unlink()
    assert run(site, "--apply") == fix.CANNOT
    assert "Reinstall: pip install" in capsys.readouterr().err
    backup.write_bytes(saved)
    assert run(site, "--apply") == fix.FINE
    assert contents(site) == whole


def test_the_site_may_be_an_environment_or_the_package(site_of, tmp_path, capsys):
    """site-packages, the root of an environment, speculators itself; two of them in one environment are named."""
    root = tmp_path / "env"
    site = root / "lib" / "python3.11" / "site-packages"
    shutil.copytree(site_of("0.3.0"), site)
    for name in (site, root, site / "speculators"):
        assert run(name) == fix.NEEDS_PATCH
    shutil.copytree(site, root / "lib" / "python3.12" / "site-packages")
    capsys.readouterr()
    assert run(root) == fix.CANNOT
    err = capsys.readouterr().err
    assert "python3.11/site-packages" in err and "python3.12/site-packages" in err
    assert run(tmp_path / "nothing") == fix.CANNOT
    assert run(tmp_path) == fix.CANNOT


def test_the_running_python_is_searched_without_importing(site_of):
    """Without --site: the first speculators on sys.path, others named, vLLM judged by its signatures (this one has
    moved on: exit 2, with the calls that break and what to do instead); nothing but the standard library imported."""
    first, second = site_of("0.3.0"), site_of("0.4.0", "second")
    code = "import sys, fix_custom_worker as f; c = f.main([]); print(sorted(sys.modules)); sys.exit(c)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(SCRIPT.parent), str(first), str(second)])}
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert process.returncode == fix.CANNOT
    assert f"speculators 0.3.0        {folder(first)}" in process.stdout
    assert f"not used: {second / 'speculators'}" in process.stdout
    assert "unexpected eos_token_id" in process.stderr and "02_extract_hidden_states.py" in process.stderr
    modules = ast.literal_eval(process.stdout.splitlines()[-1])
    assert not {"vllm", "speculators", "torch", "transformers"} & set(modules)
    tree = ast.parse(SCRIPT.read_text())
    imported = {alias.name.split(".")[0] for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module.split(".")[0] for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert imported <= set(sys.stdlib_module_names)


@pytest.mark.parametrize(
    ("definition", "call", "problem"),
    [
        ("def f(a, b, c=1): pass", "f(1, b=2)", None),
        ("def f(a, b, c=1): pass", "f(1)", "missing b"),
        ("def f(a, b, c=1): pass", "f(1, 2, d=4)", "unexpected d"),
        ("def f(a, *, b): pass", "f(1, 2)", "takes 2 arguments, is given 2 by position"),
        ("def f(a, **more): pass", "f(1, d=4)", None),
        ("class f:\n def __init__(self, a): pass", "f()", "missing a"),
        (
            "class f:\n a: int\n b: int = Field(default=1)\n c: int = Field(init=False)\n D: ClassVar[int] = 1",
            "f()",
            "missing a",
        ),
        ("class f:\n a: int = Field(ge=1)\n b: int = field(default_factory=list)", "f(b=1)", "missing a"),
        ("class f:\n a: int = 1", "f(b=1)", "unexpected b"),
        ("x = 1", "f()", "vLLM has no such name"),
    ],
)
def test_calls_are_judged_by_signature(tmp_path, definition, call, problem):
    """Functions, constructors, pydantic's and the standard library's dataclasses; verdicts worked out by hand."""
    (tmp_path / "m.py").write_text(definition)
    vllm = fix.Vllm(tmp_path)
    assert fix.call_problem(ast.parse(call, mode="eval").body, vllm.parameters("m.py", "f")) == problem


@pytest.fixture(scope="module")
def worker(shipped, tmp_path_factory):
    """0.3.0's custom_worker, repaired and imported (with the vLLM of this environment)."""
    source = (folder(shipped["0.3.0"]) / fix.WORKER).read_text()
    path = tmp_path_factory.mktemp("worker") / fix.WORKER
    path.write_text(fix.repair_source(source, fix.WORKER, "0.3.0"))
    spec = importlib.util.spec_from_file_location("repaired_custom_worker", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_llama_4_scaling_by_hand(worker):
    """1 + beta ln(1 + floor(p / original)), [tokens, 1, 1]; None without the setting."""
    config = SimpleNamespace(llama_4_scaling={"original_max_position_embeddings": 4, "beta": 0.5})
    found = worker._llama_4_scaling(config, torch.tensor([0, 3, 4, 11, 12]))
    expected = [1.0, 1.0, 1 + 0.5 * math.log(2), 1 + 0.5 * math.log(3), 1 + 0.5 * math.log(4)]
    assert found.shape == (5, 1, 1)
    assert torch.allclose(found.flatten(), torch.tensor(expected))
    assert worker._llama_4_scaling(SimpleNamespace(), torch.tensor([0])) is None


def test_the_scaling_reaches_a_layer_that_takes_it(worker):
    """DeepseekV2's layer by position, its scaling not None; a layer without the parameter gets none."""

    class DeepseekLayer(torch.nn.Module):
        def forward(self, positions, hidden_states, residual, llama_4_scaling=None):
            return positions, hidden_states, residual, llama_4_scaling

    class OtherOrder(torch.nn.Module):
        def forward(self, hidden_states, positions, residual, llama_4_scaling=None):
            return positions, hidden_states, residual, llama_4_scaling

    class LlamaLayer(torch.nn.Module):
        def forward(self, positions, hidden_states, residual):
            return positions, hidden_states, residual, "none taken"

    deepseek, plain = SimpleNamespace(scoring_func="sigmoid"), SimpleNamespace()
    given = ("positions", "hidden_states", "residual", "scaling")
    for config, layer in ((deepseek, DeepseekLayer()), (plain, DeepseekLayer()), (deepseek, OtherOrder())):
        assert worker._call_layer(config, layer, *given) == given
    assert worker._call_layer(plain, LlamaLayer(), *given) == (*given[:3], "none taken")


def capturing_extension(worker, layer_order):
    """A worker extension as _setup_hidden_states_capture leaves it, over a batch that the test fills."""
    extension = worker.HiddenStatesWorkerExtension()
    extension.model_runner = SimpleNamespace(input_batch=SimpleNamespace())
    extension._layer_order, extension._captured_states = layer_order, None
    return extension


def forward(extension, requests, first_row):
    """One forward of (request, start, number of rows): two layers, the second 100 higher; returns the next row."""
    batch = extension.model_runner.input_batch
    batch.req_ids = [name for name, _, _ in requests]
    batch.num_computed_tokens_cpu = [start for _, start, _ in requests]
    extension._num_scheduled_tokens = {name: rows for name, _, rows in reversed(requests)}
    last_row = first_row + sum(rows for _, _, rows in requests)
    rows = torch.arange(first_row, last_row).float()[:, None]
    extension._store_captured_states([rows, rows + 100])
    return last_row


def test_rows_belong_to_requests_in_the_order_of_the_batch(worker):
    """Chunks over three forwards, a reordered batch and a preempted request that starts again; layers as asked for."""
    extension = capturing_extension(worker, layer_order=[1, 0])
    row = forward(extension, [("b", 0, 2), ("a", 0, 3)], 0)  # b: 0 1, a: 2 3 4
    row = forward(extension, [("a", 3, 1), ("b", 2, 2)], row)  # a: 5, b: 6 7
    forward(extension, [("b", 0, 2)], row)  # b again from its start: 8 9
    captured = extension._get_captured_states()
    assert {name: [layer[:, 0].tolist() for layer in layers] for name, layers in captured.items()} == {
        "a": [[102, 103, 104, 105], [2, 3, 4, 5]],
        "b": [[108, 109], [8, 9]],
    }
    assert extension._get_captured_states() is None


def test_a_gap_between_chunks_is_an_error(worker):
    """Rows that were never captured are not made up."""
    extension = capturing_extension(worker, layer_order=[0, 1])
    forward(extension, [("a", 0, 3)], 0)
    with pytest.raises(RuntimeError, match="request a: 3 rows captured so far, but vLLM goes on at position 4"):
        forward(extension, [("a", 4, 1)], 3)


def test_the_warm_up_run_is_not_captured(worker):
    """It has no requests."""
    extension = capturing_extension(worker, layer_order=[0])
    extension._num_scheduled_tokens = None
    extension._store_captured_states([torch.zeros(16, 1)])
    assert extension._get_captured_states() is None
