"""Every file in configs/ is accepted by every script that has a section in it, and fits the target it is for."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from reference_draft import small_batch, small_draft

from eagle3 import layers
from eagle3.draft import DraftConfig
from eagle3.export import transformer_layer_config
from eagle3.optim import Optimizer
from eagle3.target import Target
from eagle3.ttt import supervised_counts, training_loss
from eagle3.vocab import DraftVocab

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = {"generate": "00_*", "prepare": "01_*", "extract": "02_*", "train": "03_*", "evaluate": "04_*"}
SECTIONS = [
    (path.name, stage)
    for path in sorted((ROOT / "configs").glob("*.yaml"))
    for stage in SCRIPTS
    if stage in yaml.safe_load(path.read_text())
]


def parser_of(stage):
    (path,) = ROOT.glob(SCRIPTS[stage] + ".py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.parser()


@pytest.mark.parametrize(("name", "stage"), SECTIONS)
def test_a_config_is_accepted_and_its_values_arrive(name, stage):
    """A renamed flag, a misspelt key or a value of the wrong type would stop a run that somebody prepared for."""
    path = ROOT / "configs" / name
    section = yaml.safe_load(path.read_text())[stage]
    parser = parser_of(stage)
    needed = [action.option_strings[0] for action in parser._actions if action.required]
    left_out = [f"{flag}=given" for flag in needed if flag.removeprefix("--") not in section]
    values = vars(parser.parse(["--config", str(path), *left_out]))
    for key, value in section.items():
        found = values[key.replace("-", "_")]
        assert plain(found) in (value, [value]), key


def plain(value):
    """A flag's value as YAML has it."""
    if isinstance(value, list):
        return [plain(v) for v in value]
    return str(value) if isinstance(value, Path) else value


@pytest.mark.parametrize("name", [f"{name}.yaml" for name in ("kimi_k25", "deepseek_v3", "llama31_8b", "qwen3_8b")])
def test_a_large_targets_config_passes_every_answer_on(name):
    """What one stage lets through the next one takes whole, and each reads what the one before wrote."""
    config = yaml.safe_load((ROOT / "configs" / name).read_text())
    made = config["generate"]["max-model-len"]
    assert made >= config["generate"]["max-tokens"]
    assert made <= config["prepare"]["max-seq-len"] <= config["extract"]["max-seq-len"]
    assert config["prepare"]["max-seq-len"] <= config["train"]["batch-tokens"]
    paths = {stage: values["model-path"] for stage, values in config.items() if "model-path" in values}
    assert len(set(paths.values())) == 1 and len(paths) == 4
    assert config["prepare"]["input"] == [config["generate"]["output"]]
    assert config["extract"]["prepared-data"] == config["prepare"]["output-dir"] + "/tokenized_data.jsonl"
    assert config["train"]["hidden-states"] == config["extract"]["output-dir"]
    assert config["evaluate"]["draft"] == config["train"]["output-dir"] + "/draft"


def test_the_kimi_config_has_room_for_thinking_answers():
    """8,192 tokens of prompt and answer."""
    config = yaml.safe_load((ROOT / "configs" / "kimi_k25.yaml").read_text())
    assert config["generate"]["max-tokens"] >= 8192


YARN = {"type": "yarn", "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
        "mscale_all_dim": 1.0}  # fmt: skip
MLA = {"num_hidden_layers": 61, "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512, "v_head_dim": 128,
       "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}  # fmt: skip
# What the targets' published config.json files say of their language model, on the model hub under these names.
PUBLISHED = {
    "kimi_k25": MLA  # moonshotai/Kimi-K2.5, text_config
    | {"model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 163840,
       "max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "rope_theta": 50000.0,
       "rope_scaling": YARN | {"factor": 64.0}},
    "deepseek_v3": MLA  # deepseek-ai/DeepSeek-V3
    | {"model_type": "deepseek_v3", "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280,
       "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000,
       "rope_scaling": YARN | {"factor": 40}},
    "llama31_8b": {  # meta-llama/Llama-3.1-8B-Instruct
        "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192}},
    "qwen3_8b": {  # Qwen/Qwen3-8B
        "model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 12288,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "rope_scaling": None},
    "smollm2": {  # HuggingFaceTB/SmolLM2-135M-Instruct
        "model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "rope_scaling": None, "tie_word_embeddings": True},
}  # fmt: skip
DRAFTS = {  # hidden, FFN, heads, kv heads, head_dim, rope type, theta
    "kimi_k25": (7168, 12288, 64, 64, 128, "yarn", 50000.0),
    "deepseek_v3": (7168, 12288, 56, 56, 128, "yarn", 10000),
    "llama31_8b": (4096, 14336, 32, 8, 128, "llama3", 500000.0),
    "qwen3_8b": (4096, 12288, 32, 8, 128, "default", 1000000),
    "smollm2": (576, 1536, 9, 3, 64, "default", 100000.0),
}
AUX_IDS = {  # vLLM's ids of the layers that the draft reads
    "kimi_k25": [3, 31, 59],  # of the command line that this project promises, 2 30 58 60
    "deepseek_v3": [2, 30, 58],
    "llama31_8b": [2, 16, 29],
    "qwen3_8b": [2, 18, 33],
    "smollm2": [2, 15, 27],
}


def target_of(name: str) -> Target:
    return Target(Path(name), PUBLISHED[name], PUBLISHED[name])


def layout(config: DraftConfig) -> tuple:
    sizes = (config.hidden_size, config.intermediate_size, config.num_heads, config.num_kv_heads, config.head_dim)
    return (*sizes, config.rope["rope_type"], config.rope["rope_theta"])


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_draft_of_a_published_target_has_the_right_layout(name):
    """From the target's config alone, with all of its rope, its norm epsilon and its positions."""
    target = target_of(name)
    config = DraftConfig.for_target(target, DraftVocab(target.vocab_size, np.arange(32000)))
    assert layout(config) == DRAFTS[name]
    assert (config.max_positions, config.norm_eps) == (target.max_positions, target.norm_eps)
    scaling = PUBLISHED[name]["rope_scaling"] or {}
    assert {key: config.rope[key] for key in scaling if key != "type"} == {
        key: value for key, value in scaling.items() if key != "type"
    }
    written = transformer_layer_config(config, torch.bfloat16)
    assert written["rope_parameters"] == config.rope and written["rope_theta"] == config.rope["rope_theta"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_asks_for_the_layers_that_are_right_for_its_target(name):
    """Ours, or the default, in vLLM's numbering: its own default is 2, n/2 and n-3; Kimi's are those of the promise."""
    count = PUBLISHED[name]["num_hidden_layers"]
    section = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())["extract"]
    ids = section.get("layer-ids") or layers.eagle_layer_ids(count)
    assert layers.check_layer_ids(ids, count) == ids
    assert layers.draft_aux_ids(ids) == AUX_IDS[name]
    if name != "kimi_k25":
        assert AUX_IDS[name] == [2, count // 2, count - 3]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_draft_of_each_layout_learns_in_one_step(name):
    """The published target with its widths divided by 64 (SmolLM2 as it is) and 512 tokens: a step lowers the loss.

    Its draft is the published one's, as much narrower: FFN, heads, grouped keys and rope are derived by the same rules.
    """
    narrow = name != "smollm2"
    text = dict(PUBLISHED[name], vocab_size=512)
    for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
        text[key] //= (64 if key.endswith("size") else 8) if narrow else 1
    for key in {"head_dim", "v_head_dim"} & text.keys():
        text[key] //= 8
    config = DraftConfig.for_target(Target(Path(name), text, text), DraftVocab(512, np.arange(256)))
    hidden, ffn, heads, kv_heads, head_dim, *_ = DRAFTS[name]
    if narrow:
        assert layout(config)[:5] == (hidden // 64, ffn // 64, heads // 8, kv_heads // 8, head_dim // 8)
    draft, teacher = small_draft(config, torch.float32)
    batch = small_batch(config, ["0001111111", "00111111"], torch.float32)
    weights = 1 / supervised_counts(batch.loss_mask, batch.offsets, 3)
    optimizer = Optimizer(draft, "adamw", 0.0)
    before = training_loss(draft, teacher, batch, weights).loss
    before.backward()
    optimizer.step(1e-3)
    assert training_loss(draft, teacher, batch, weights).loss < before
