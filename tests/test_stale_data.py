"""Data of another target, setting or version is refused by the stage that reads it, naming what differs."""

import json
import re
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from eagle3 import evaluate, extract, files, prepared, shards, vocab
from eagle3.draft import Draft, DraftConfig, Teacher, embedding
from eagle3.export import export
from eagle3.states import HiddenStates
from eagle3.target import Target
from tests import stages
from tests.states_folder import random_samples, write_hidden_states

LAYERS = [1, 2, 3, 5]


def edit_json(name, **values):
    def edit(folder):
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return edit


def edit_template(folder):
    (folder / "chat_template.jinja").write_text("{{ messages }}")


def edit_weights(folder):
    """Another training of the same architecture: only the final norm's values differ, not a size."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + np.float32(0.5)
    save_file(tensors, path, {"format": "pt"})


CHANGES = {
    "config": edit_json("config.json", rope_theta=12345.0),
    "tokenizer_class": edit_json("tokenizer_config.json", tokenizer_class="LlamaTokenizerFast"),
    "tokenizer": edit_json("tokenizer_config.json", model_max_length=77),
    "chat_template": edit_template,
    "weights": edit_weights,
}
# A class or a template stands in the tokenizer's files, so their hash differs as well.
NAMED = {
    "tokenizer_class": ["tokenizer_class", "tokenizer"],
    "chat_template": ["tokenizer", "chat_template"],
}


@pytest.fixture
def changed(tiny_llama, tmp_path):
    """A function from the name of a change to a copy of the tiny Llama that differs in that alone."""

    def make(name):
        folder = tmp_path / "changed"
        shutil.copytree(tiny_llama, folder)
        CHANGES[name](folder)
        return folder

    return make


@pytest.fixture
def data(tiny_llama, tmp_path):
    """Two samples prepared for the tiny Llama, the longer one of 40 tokens."""
    target = Target.open(tiny_llama)
    folder = tmp_path / "prepared"
    folder.mkdir()
    with open(folder / prepared.DATA, "w") as file:
        for name, length in (("a", 10), ("b", 40)):
            row = prepared.Row(name, np.arange(length, dtype=np.int32), np.ones(length, np.uint8))
            prepared.write_row(file, row)
    vocab.DraftVocab(target.vocab_size).save(folder)
    prepared.write_metadata(folder, {"target": target.fingerprint, "settings": {"max_seq_len": 40}})
    return folder / prepared.DATA


def options(model, data, folder, max_seq_len=64):
    return extract.Options(
        model_path=model, prepared_data=data, output_dir=folder, batch_size=1, max_seq_len=max_seq_len, layer_ids=LAYERS
    )


def named(message: str) -> list[str]:
    """The parts of the fingerprint that an error names."""
    return re.findall(r"(\w+) \(expected", message)


@pytest.mark.parametrize("name", CHANGES)
def test_extraction_refuses_data_of_another_target(changed, data, tmp_path, name):
    """02: a target that differs in one thing from the one the data was prepared with is refused naming that thing."""
    with pytest.raises(ValueError, match="was made with another target") as error:
        extract.plan_extraction(options(changed(name), data, tmp_path / "out"))
    assert named(str(error.value)) == NAMED.get(name, [name])


@pytest.mark.parametrize("name", CHANGES)
def test_training_refuses_states_of_another_target(tiny_llama, changed, tmp_path, name):
    """03: the same for the target that made the states."""
    of = Target.open(tiny_llama)
    samples = random_samples([8, 9], 4, of.hidden_size, of.vocab_size)
    folder = write_hidden_states(tmp_path / "states", of, samples, LAYERS, vocab.DraftVocab(of.vocab_size))
    HiddenStates.open(folder, of)
    with pytest.raises(ValueError, match="was made with another target") as error:
        HiddenStates.open(folder, Target.open(changed(name)))
    assert named(str(error.value)) == NAMED.get(name, [name])


def test_hashes_are_shortened_and_names_are_not(tiny_llama, changed, data, tmp_path):
    """A class is named in full on both sides, a hash by its first 12 digits."""
    other = changed("tokenizer_class")
    was, now = Target.open(tiny_llama).fingerprint, Target.open(other).fingerprint
    with pytest.raises(ValueError) as error:
        extract.plan_extraction(options(other, data, tmp_path / "out"))
    said = f"its tokenizer_class (expected {was['tokenizer_class']}, found LlamaTokenizerFast)"
    assert f"{said} and tokenizer (expected {was['tokenizer'][:12]}, found {now['tokenizer'][:12]})" in str(error.value)


@pytest.mark.parametrize(("keep", "said"), [(None, "missing; run 01_prepare_data.py again"), (20, "was changed after")])
def test_extraction_refuses_data_without_its_draft_vocabulary(tiny_llama, data, tmp_path, keep, said):
    """It is copied beside the states, and stage 3 needs it: found before the load, not after it."""
    path = data.with_name(vocab.FILE)
    whole = path.read_text()
    path.unlink() if keep is None else path.write_text(whole[:keep])
    with pytest.raises(ValueError, match=f"{path}: {said}"):
        extract.plan_extraction(options(tiny_llama, data, tmp_path / "out"))


@pytest.mark.parametrize("size", [0, 4, 10_000])
def test_weights_that_were_copied_half_are_named(tiny_llama, tmp_path, size):
    """The file is named, and that it has to be copied again, wherever the target is first looked at."""
    folder = tmp_path / "half"
    shutil.copytree(tiny_llama, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:size])
    with pytest.raises(ValueError, match=f"{weights}: not a whole safetensors file: .*; copy or download it again"):
        Target.open(folder).fingerprint  # noqa: B018


def test_extraction_refuses_a_target_of_which_a_weight_file_is_missing_or_half(tiny_kimi, data, tmp_path):
    """Any file that the index names, not only those with a tensor that is read: before the load."""
    folder = tmp_path / "copied"
    shutil.copytree(tiny_kimi, folder)
    path = folder / "model-00002-of-00005.safetensors"
    path.write_bytes(path.read_bytes()[:10_000])
    with pytest.raises(ValueError, match=f"{path}: not a whole safetensors file"):
        extract.plan_extraction(options(folder, data, tmp_path / "out"))
    path.unlink()
    with pytest.raises(ValueError, match=f"{path}: missing, though the index names it"):
        extract.plan_extraction(options(folder, data, tmp_path / "out"))


def test_extraction_refuses_longer_samples(tiny_llama, data, tmp_path):
    """02 with a --max-seq-len below that of the data names the sample, its length and what to do."""
    with pytest.raises(ValueError, match=r"1 of 2 samples are longer, the longest \(b\) has 40 tokens; raise it"):
        extract.plan_extraction(options(tiny_llama, data, tmp_path / "out", max_seq_len=39))


@pytest.mark.parametrize("damage", ["vocabulary missing", "vocabulary changed", "format before"])
def test_preparing_again_leads_out_of_what_extraction_refuses(tiny_llama, tmp_path, damage):
    """What 02 refuses, 01 does not call done: it says --overwrite, and with that 02 takes the data."""
    rows = tmp_path / "chats.jsonl"
    rows.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    command = ["01_prepare_data.py", "--model-path", tiny_llama, "--input", rows, "--output-dir", tmp_path / "p"]
    assert stages.run_here(*command)[0] == 0
    data, words = tmp_path / "p" / prepared.DATA, tmp_path / "p" / vocab.FILE
    if damage == "format before":
        path = data.with_name(prepared.METADATA)
        files.write_json(path, files.read_json(path) | {"format": "eagle3-prepared/1"})
    else:
        words.unlink() if damage == "vocabulary missing" else words.write_text("{}")
    with pytest.raises(ValueError):
        extract.plan_extraction(options(tiny_llama, data, tmp_path / "out"))
    code, log = stages.run_here(*command)
    assert code == 2 and "--overwrite" in log.splitlines()[-1]
    assert stages.run_here(*command, "--overwrite")[0] == 0
    assert extract.plan_extraction(options(tiny_llama, data, tmp_path / "out")).rows


def test_a_vocabulary_for_a_target_of_another_size_is_refused(tiny_llama, data, tmp_path):
    """By 02 before the load, and by 03, each with its own way out."""
    target, folder = Target.open(tiny_llama), data.parent
    vocab.DraftVocab(target.vocab_size + 1).save(folder)
    metadata = files.read_json(folder / prepared.METADATA)
    prepared.write_metadata(folder, {k: metadata[k] for k in ("target", "settings")})
    sizes = (
        f"made for a target of {target.vocab_size + 1} tokens, this one has {target.vocab_size}; run 01_prepare_data.py"
    )
    with pytest.raises(ValueError, match=f"{folder}/{vocab.FILE}: {sizes} again with --overwrite"):
        extract.plan_extraction(options(tiny_llama, data, tmp_path / "out"))
    samples = random_samples([4], len(LAYERS), target.hidden_size, target.vocab_size)
    states = write_hidden_states(tmp_path / "states", target, samples, LAYERS, vocab.DraftVocab(target.vocab_size + 1))
    with pytest.raises(ValueError, match=f"{states}/{vocab.FILE}: {sizes} and 02_extract_hidden_states.py again"):
        HiddenStates.open(states, target)


def test_data_that_is_gone_is_made_again(tiny_llama, tmp_path):
    """metadata.json alone is no preparation that is done: the same command writes the same rows."""
    rows = tmp_path / "chats.jsonl"
    rows.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    command = ["01_prepare_data.py", "--model-path", tiny_llama, "--input", rows, "--output-dir", tmp_path / "p"]
    data = tmp_path / "p" / prepared.DATA
    assert stages.run_here(*command)[0] == 0
    whole = data.read_bytes()
    data.unlink()
    assert stages.run_here(*command)[0] == 0
    assert data.read_bytes() == whole


def test_data_of_another_format_or_changed_is_refused(tiny_llama, data, tmp_path):
    """02: rows written by another format version, and rows edited after they were prepared."""
    path = data.with_name(prepared.METADATA)
    metadata = files.read_json(path)
    files.write_json(path, metadata | {"format": "eagle3-prepared/0"})
    with pytest.raises(ValueError, match="expected format 'eagle3-prepared/2', found 'eagle3-prepared/0'"):
        extract.plan_extraction(options(tiny_llama, data, tmp_path / "out"))
    files.write_json(path, {k: v for k, v in metadata.items() if k != "target"})
    with pytest.raises(ValueError, match="metadata.json: has no 'target', so it is not as 01_prepare_data.py wrote it"):
        extract.plan_extraction(options(tiny_llama, data, tmp_path / "out"))
    files.write_json(path, metadata)
    data.write_text(data.read_text().replace("[0,1,", "[0,2,"))
    with pytest.raises(ValueError, match="was changed after it was prepared"):
        extract.plan_extraction(options(tiny_llama, data, tmp_path / "out"))


@pytest.mark.parametrize("package", ["vllm", "torch"])
def test_extraction_does_not_go_on_under_another_version(tiny_llama, data, tmp_path, package):
    """02: a set begun under another vLLM or torch is refused naming package and both versions."""
    out = tmp_path / "out"
    out.mkdir()
    planned = extract.plan_extraction(options(tiny_llama, data, out))
    metadata = json.loads(json.dumps(planned.metadata))
    now, metadata["shared"]["versions"][package] = metadata["shared"]["versions"][package], "0.0.1"
    files.write_json(out / shards.METADATA, metadata)
    with pytest.raises(ValueError, match=rf"versions.{package}: expected '0.0.1', found '{re.escape(now)}'"):
        extract.check_folder(planned)


@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}])
def test_evaluation_in_another_mode_is_said(tiny_llama, tmp_path, capsys, kwargs):
    """04: a draft trained in one mode and measured in another gives a warning that names both; in the same, none."""
    target = Target.open(tiny_llama)
    full = vocab.DraftVocab(target.vocab_size)
    samples = random_samples([8, 9], 4, target.hidden_size, target.vocab_size)
    folder = write_hidden_states(tmp_path / "states", target, samples, LAYERS, full)
    metadata = files.read_json(folder / shards.METADATA)
    metadata["prepared"] = {"settings": {"chat_template_kwargs": kwargs}}
    files.write_json(folder / shards.METADATA, metadata)
    trained = HiddenStates.open(folder, target).template_kwargs
    draft = Draft.create(DraftConfig.for_target(target, full), embedding(target), Teacher.for_target(target, full).head)
    export(tmp_path / "draft", draft, target, full, LAYERS, 3, trained)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Hello"}\n')
    evaluate.plan_evaluation(evaluate.Options(draft=[tmp_path / "draft"], prompts=[prompts]))
    warning = 'WARNING: the draft was trained with --chat-template-kwargs {"enable_thinking": false}, not {}'
    assert (warning in capsys.readouterr().out) == bool(kwargs)
