"""The draft's model card: what the stages know, in the form that the hub reads, and never somebody else's text."""

import json
import shutil

import pytest
import yaml

from eagle3 import card, cli, files, pages, runs
from eagle3.drafts import open_draft
from tests import stages


@pytest.fixture
def draft(finished_run, tmp_path):
    """The exported draft of a run, to be changed."""
    shutil.copytree(finished_run, tmp_path / "run")
    content = files.read_json(tmp_path / "run" / "evaluation.json")
    text = json.dumps(content).replace(str(finished_run), str(tmp_path / "run"))
    (tmp_path / "run" / "evaluation.json").write_text(text)
    return tmp_path / "run" / "draft"


def evaluation(draft):
    return files.read_json(draft.parent / "evaluation.json")


def text_and_header(draft):
    text = (draft / card.NAME).read_text()
    return text, yaml.safe_load(text.split("---\n")[1])


def command(*argv) -> int:
    """Exit code of `python -m eagle3.card`."""
    with pytest.raises(SystemExit) as end:
        cli.run(Parsed(argv), card.check, card.work)
    return end.value.code


class Parsed(cli.Tool):
    """The card's own parser, with these arguments."""

    def __init__(self, argv):
        self.argv, self.own = list(map(str, argv)), card.parser()
        super().__init__(self.own.prog, None)

    def parse(self, argv=None):
        return self.own.parse(self.argv)


def test_training_leaves_a_card_that_the_hub_can_read(finished_run, tiny_llama):
    """Front matter as YAML; the estimate of the exported step, the counts and the settings are those of the run."""
    text, header = text_and_header(finished_run / "draft")
    assert header == {
        "license": "other",
        "base_model": tiny_llama.name,
        "pipeline_tag": "text-generation",
        "tags": list(card.TAGS),
    }
    best = runs.best(runs.read_metrics(finished_run))
    settings = files.read_json(finished_run / runs.SETTINGS)
    assert f"**{best['acceptance_length']:.2f}** (step {best['step']})" in text
    assert f"{settings['counts']['samples']} samples of {settings['counts']['tokens']:,} tokens" in text
    assert "| ttt_steps | 3 |" in text and "decoder layers 1, 2, 4 (0-based)" in text
    assert "400 of the target's 512 tokens" in text and "Not measured in vLLM yet" in text


def test_both_ways_to_serve_are_given(finished_run):
    """The second command's JSON is JSON, with the number of tokens that the draft drafts by itself."""
    text = (finished_run / "draft" / card.NAME).read_text()
    assert "vllm serve DIR " in text
    options = json.loads(text.split("--speculative-config '")[1].split("'")[0])
    assert options == {"model": "DIR", "method": "eagle3", "num_speculative_tokens": 3}


def test_what_was_measured_is_on_the_card(draft):
    """Stage 4's figures by benchmark: mt_bench 1 + 5 / 4 = 2.25, all 1 + 5 / 7 = 1.71, 3 of 4 answers identical."""
    assert list(card.write_measured(evaluation(draft))) == [f"card: {draft / card.NAME}"]
    text, _ = text_and_header(draft)
    assert "| mt_bench | 2 | 2.25 | 75.0% 25.0% 25.0% | 2.00x | 1 of 2 |" in text
    assert "| all | 4 | 1.71 |" in text and "3 of 4 |" in text and "on a CPU" in text
    assert "Not measured" not in text


def test_licence_and_base_model_stay_as_they_were_set(draft):
    """Set once by hand, they survive what stage 4 writes later."""
    assert command(draft, "--license", "apache-2.0", "--base-model", "org/target") == 0
    list(card.write_measured(evaluation(draft)))
    text, header = text_and_header(draft)
    assert (header["license"], header["base_model"]) == ("apache-2.0", "org/target")
    assert "licence is not known" not in text and "# EAGLE-3 draft for org/target" in text


def test_the_targets_own_licence_is_taken_over(draft, tiny_llama, tmp_path):
    """A target whose card names its licence passes it on, with its name where it is none that the hub knows."""
    target = shutil.copytree(tiny_llama, tmp_path / "target")
    (target / card.NAME).write_text("---\nlicense: other\nlicense_name: modified-mit\n---\n# Target\n")
    config = files.read_json(draft / "config.json")
    config["speculators_config"]["verifier"]["name_or_path"] = str(target)
    files.write_json(draft / "config.json", config)
    card.write(draft)
    text, header = text_and_header(draft)
    assert (header["license"], header["license_name"]) == ("other", "modified-mit")
    assert "licence is not known" not in text


def test_the_command_finds_the_evaluation_of_these_weights_only(draft):
    """The figures beside the draft are on its card; after another training of the same folder they are not."""
    assert command(draft) == 0
    assert "| mt_bench |" in (draft / card.NAME).read_text()
    with open(draft / "model.safetensors", "ab") as weights:
        weights.write(b" ")
    assert command(draft) == 0
    assert "| mt_bench |" not in (draft / card.NAME).read_text()


def test_an_evaluation_of_an_earlier_format_is_named_as_one(draft, capsys):
    """The line says which format was expected and what to do, and the card stays as it was."""
    before = (draft / card.NAME).read_text()
    files.write_json(draft.parent / "evaluation.json", evaluation(draft) | {"format": "eagle3-evaluation/1"})
    assert command(draft) == 1
    assert "evaluation.json: expected format 'eagle3-evaluation/2'" in capsys.readouterr().err
    assert (draft / card.NAME).read_text() == before


def test_a_card_of_somebodys_own_is_left_alone(draft):
    """Without the line that says where it is from, no stage touches it."""
    (draft / card.NAME).write_text("# My draft\n")
    assert "left alone" in card.write(draft, evaluation(draft))
    assert (draft / card.NAME).read_text() == "# My draft\n"


def test_a_folder_that_cannot_be_written_is_told_in_a_line(draft, monkeypatch):
    """Stage 4 has its figures by then: it goes on."""

    def refuse(path, text):
        raise PermissionError(30, "Read-only file system", str(path))

    monkeypatch.setattr(pages, "write", refuse)
    assert list(card.write_measured(evaluation(draft))) == [
        f"card: not written: [Errno 30] Read-only file system: '{draft / card.NAME}'"
    ]


def test_the_card_is_no_part_of_what_identifies_a_draft(draft):
    """Whatever the card says, the draft's hashes are the same, so that no evaluation is made anew for it."""
    before = open_draft(draft).sha256
    command(draft, "--license", "mit")
    assert open_draft(draft).sha256 == before


def test_what_is_no_draft_is_refused(tmp_path):
    """Exit code 2 and the folder's name."""
    result = stages.run("-m", "eagle3.card", tmp_path)
    assert result.returncode == 2 and f"{tmp_path}: has no config.json" in result.stdout
