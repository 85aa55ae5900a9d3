"""A token is supervised exactly when the target would generate it, for every template, and prompts are the server's."""

import json
import re
import shutil
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
from chat_targets import CASES, EXPECTED, GOLDEN, TARGETS, TOOLS, assistant, target_folder, user
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from transformers.convert_slow_tokenizer import bytes_to_unicode

from eagle3 import chat
from eagle3.conversations import THINK_CLOSE, THINK_OPEN, Conversation, Drop, parse
from eagle3.sources import Raw
from eagle3.target import Target
from eagle3.tokenizer import decode, decoder, encoder, known_ids, load_tokenizer, quick_patterns
from tests import stages

LOCAL = [name for name in TARGETS if name != "smollm2"]
FAMILY_ENDS = {"llama3": "<|eot_id|>", "glm": "<|user|>", "deepseek": "<｜end▁of▁sentence｜>"}
ENDS = {name: FAMILY_ENDS.get(name.split("_")[0], "<|im_end|>") for name in TARGETS}


@cache
def loaded(name: str) -> chat.Chat:
    return chat.load(Target.open(target_folder(name)), True, TARGETS[name][1])


def conversation(row: dict) -> Conversation:
    return parse(Raw("row", 1, row))


def samples(name: str, row: dict, **kwargs) -> list[chat.Sample]:
    return loaded(name).samples(conversation(row), kwargs.pop("max_tokens", 4096), **kwargs).samples


def supervised(name: str, sample: chat.Sample) -> list[str]:
    """The text of each supervised span."""
    spans: list[list[int]] = []
    before = 0
    for token, mask in zip(sample.input_ids, sample.loss_mask, strict=True):
        if mask and not before:
            spans.append([])
        if mask:
            spans[-1].append(token)
        before = mask
    return [loaded(name).decode(span) for span in spans]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", TARGETS)
def test_golden(name, case):
    """Ids and mask equal those of the template's own mechanism, exactly, for every template and case."""
    if EXPECTED[name][case] is None:
        pytest.skip("this template knows no tools")
    golden = json.loads((GOLDEN / f"{name}.json").read_text())[case]
    made = samples(name, CASES[case])
    assert [s.input_ids for s in made] == [g["input_ids"] for g in golden]
    assert [s.loss_mask for s in made] == [g["loss_mask"] for g in golden]
    assert [supervised(name, s) for s in made] == EXPECTED[name][case]


@pytest.mark.parametrize("name", TARGETS)
def test_prompt_ids_are_those_of_the_template(name):
    """prompt_ids equals apply_chat_template(tokenize=True)."""
    messages = [user("Grüße, 你好 🤷🏽‍♀️\n\n"), assistant("x"), user("  y")]
    tokenizer = loaded(name).tokenizer
    expected = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False, **TARGETS[name][1]
    )
    assert loaded(name).prompt_ids(messages) == expected


@cache
def smollm2_lost_bytes() -> set[int]:
    """Bytes that the real tokenizer has no token for and leaves out: six control characters, planes 4 to 11."""
    vocabulary = loaded("smollm2").tokenizer.get_vocab()
    return {byte for byte, char in bytes_to_unicode().items() if char not in vocabulary}


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40).filter(str.strip)


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=40, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(turns=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=3))
def test_supervised_spans_give_back_the_answers(name, turns):
    """Property: decoding the supervised spans gives each answer and its end token, once, in order; the prompt before an
    answer has exactly the server's ids.

    A think tag in an answer is mark-up and not text, for a target without such a token too (tested below); Hypothesis
    tries the strings that the code names, so it does come to write one.
    """
    texts = [text for turn in turns for text in turn]
    assume(not any(tag in answer for _, answer in turns for tag in (THINK_OPEN, THINK_CLOSE)))
    assume(not any(loaded(name)._control.search(text) for text in texts))  # a drop, tested below
    assume(name != "smollm2" or not smollm2_lost_bytes() & set("".join(texts).encode()))
    row = {"messages": [m for question, answer in turns for m in (user(question), assistant(answer))]}
    made = samples(name, row)
    spans = [span for sample in made for span in supervised(name, sample)]
    assert len(spans) == len(turns)
    for span, (_, answer) in zip(spans, turns, strict=True):
        text = span
        if name != "smollm2" and "instant" not in name:  # those have no thoughts
            text = span.strip("\n").removeprefix("<think>").strip("\n").removeprefix("</think>")
        assert text.endswith(ENDS[name])
        assert text.removesuffix(ENDS[name]).strip() == answer.strip()
        if name in ("smollm2", "kimi", "kimi_instant", "deepseek_v31_instant"):  # templates that change nothing
            assert text == answer + ENDS[name]
    first = loaded(name).prompt_ids([user(turns[0][0])])
    assert made[0].input_ids[: len(first)] == first
    assert not any(made[0].loss_mask[: len(first)]) and made[0].loss_mask[len(first)] == 1


def test_d1_no_generation_tag_needed():
    """D1: a template without generation tags gives a mask that is not empty."""
    assert "{% generation" not in loaded("smollm2").template
    assert sum(samples("smollm2", CASES["plain"])[0].loss_mask) > 0


class TestD2Tokenizer:
    """D2: the tokenizer is the declared class, think tags are one token, and text comes back."""

    def test_kimi(self):
        kimi = loaded("kimi")
        assert type(kimi.tokenizer).__name__ == "TikTokenTokenizer"
        opened, closed = kimi.control_tokens["<think>"], kimi.control_tokens["</think>"]
        ids = kimi.encode("<think>你好</think>")
        assert (ids[0], ids[-1]) == (opened, closed) == (982, 983)
        assert kimi.decode(ids) == "<think>你好</think>"

    def test_kimi_is_encoded_by_its_tiktoken_alone_where_that_gives_the_same(self):
        """Kimi's class looks at every character to cut long runs; texts without one skip that, with the same ids."""
        kimi, calls = loaded("kimi"), []
        own = kimi.tokenizer.encode
        for text in ("Hi <think>", "a" * 20_000, "a" * 20_001, "x" + "river" * 12_001, " " * 60_000, "a b" * 150_000):
            expected = kimi.tokenizer(text, add_special_tokens=False)["input_ids"]
            with mock.patch.object(kimi.tokenizer, "encode", lambda t: calls.append(len(t)) or own(t)):
                assert kimi.encode(text) == expected
        assert calls == [20_001, 60_006, 60_000, 450_000]
        whole = kimi.tokenizer.model.encode("x" + "river" * 12_001, allowed_special="all")
        assert whole != kimi.encode("x" + "river" * 12_001), "a run that is cut has other ids, so the length matters"

    def test_long_texts_without_long_runs_are_encoded_by_tiktoken_alone(self):
        """Up to 100,000 characters, as thinking answers have, if no run is longer than 20,000; the ids are its own."""
        kimi, calls = loaded("kimi"), []
        own = kimi.tokenizer.encode
        words, run = "a river\n" * 12_500, "x" * 20_001
        short = (words, words[:60_000] + "x" * 9_999, words[5:-7], "é " * 30_000, "x " + words[:20_001])
        long = (words + "x", words[:50_000] + run, run + words[:50_000], words[:7] + " " * 20_001 + words[:9_999])
        with mock.patch.object(kimi.tokenizer, "encode", lambda t: calls.append(t) or own(t)):
            assert all(kimi.encode(text) == own(text) for text in (*short, *long))
        assert calls == list(long)

    @settings(max_examples=300, deadline=None, database=None, derandomize=True)
    @given(st.data())
    def test_text_is_cut_at_special_tokens_as_tiktoken_cuts_it(self, data):
        """Whole special tokens, parts of them, one beside or inside another, in any text: the ids are tiktoken's."""
        model = loaded("kimi").tokenizer.model
        token = st.sampled_from(sorted(model.special_tokens_set))
        part = st.builds(lambda t, n: t[n:] if n > 0 else t[:n] if n else t, token, st.integers(-5, 5))
        text = "".join(data.draw(st.lists(st.one_of(token, part, TEXTS, st.sampled_from(" <[|>]\n")), max_size=8)))
        assert loaded("kimi").encode(text) == model.encode(text, allowed_special="all")

    @settings(max_examples=300, deadline=None, database=None, derandomize=True)
    @given(st.lists(st.one_of(st.integers(0, 1023), st.integers(0, 255), st.integers(960, 983)), max_size=12))
    def test_any_ids_are_decoded_to_the_text_that_transformers_gives(self, ids):
        """Parts of characters and special tokens included, though it is tiktoken alone that decodes them."""
        kimi = loaded("kimi")
        assert kimi.decode == kimi.tokenizer.model.decode
        assert kimi.decode(ids) == decode(kimi.tokenizer, ids)

    def test_what_is_not_its_tiktoken_alone_decodes_by_itself(self):
        """A class with a decoding of its own, and a token that was added beside tiktoken, which does not know it."""
        tokenizer = load_tokenizer(Target.open(target_folder("kimi")), True)
        assert decoder(tokenizer) == tokenizer.model.decode
        whole = tokenizer.model.decode
        for own in (lambda text: text.lstrip(" "), lambda text: text.replace("\ufffd", ""), lambda text: text.upper()):
            with mock.patch.object(tokenizer, "decode", lambda ids, own=own, **_: own(whole(ids))):
                assert decoder(tokenizer) != whole
        tokenizer.add_tokens(["<new>"], special_tokens=True)
        assert decoder(tokenizer)([1024, *tokenizer.encode("a")]) == "<new>a"
        assert known_ids(tokenizer) == list(range(1025))

    @pytest.mark.parametrize(
        ("tokens", "patterns"),
        [
            (["<a>", "<ab>", "[X]"], ["<ab>|<a>", r"\[X\]"]),
            (["<a>", "[<a>]", "[X]"], [r"\[<a>\]|<a>|\[X\]"]),
            (["<a>", ">b"], ["<a>|>b"]),
            ([], []),
        ],
        ids=["apart", "one inside another", "one over another's end", "none"],
    )
    def test_tokens_are_searched_by_first_character_where_they_cannot_overlap(self, tokens, patterns):
        """One pattern a first character; one of all, the longest first, where a token holds another's first."""
        assert [p.pattern for p in quick_patterns(tokens)] == patterns

    @pytest.mark.parametrize("cut", [*range(60_000, 60_004), 99_990])
    def test_a_class_that_cuts_long_texts_is_not_passed_by(self, cut):
        """Wherever a tokenizer class cuts a text of up to 100,000 characters, its own encode is called."""
        tokenizer = loaded("kimi").tokenizer
        own = tokenizer.encode
        pieces = lambda t: [t[at : at + cut] for at in range(0, len(t), cut)]  # noqa: E731
        with mock.patch.object(tokenizer, "encode", lambda t, **kw: [i for piece in pieces(t) for i in own(piece)]):
            encode = encoder(tokenizer, loaded("kimi").control_tokens)
        assert encode.__name__ == "bare"
        assert encoder(tokenizer, loaded("kimi").control_tokens).__name__ == "direct"

    def test_remote_code_not_trusted(self):
        """Transformers would convert it silently; the flag is named instead."""
        with pytest.raises(ValueError, match="--trust-remote-code"):
            chat.load(Target.open(target_folder("kimi")), False)

    def test_replaced_class_is_refused(self, tmp_path):
        """A declared class that Transformers replaces by its generic one is refused by name."""
        folder = shutil.copytree(target_folder("kimi"), tmp_path / "kimi")
        config = json.loads((folder / "tokenizer_config.json").read_text())
        del config["auto_map"]
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match="expected the tokenizer class TikTokenTokenizer.*found TokenizersBackend"):
            chat.load(Target.open(folder), True)

    def test_split_think_tag_is_refused(self, tmp_path):
        """A control token that is not one id is refused."""
        folder = shutil.copytree(target_folder("kimi"), tmp_path / "kimi")
        code = (folder / "tokenization_kimi.py").read_text()
        code = code.replace('{"allowed_special": "all"}', '{"disallowed_special": ()}')
        (folder / "tokenization_kimi.py").write_text(code)
        with pytest.raises(ValueError, match=r"encodes .* as \[.*\], expected \[9\d\d\]"):
            chat.load(Target.open(folder), True)


@pytest.mark.parametrize("name", TARGETS)
def test_d3_characters_of_several_tokens(name):
    """D3: an answer of characters that tokens split is supervised whole, without a broken character at its ends."""
    content = "🤷🏽‍♀️ 司马 é"
    (span,) = supervised(name, samples(name, {"messages": [user("x"), assistant(content)]})[0])
    assert span.endswith(content + ENDS[name]) and "\ufffd" not in span


@pytest.mark.parametrize("name", [name for name in LOCAL if EXPECTED[name]["tools"]])
def test_d4_tool_call_without_content(name):
    """D4: null, empty and missing content give the same ids; the call is supervised, its arguments are JSON."""
    ids = []
    for content in ({"content": None}, {"content": ""}, {}):
        for arguments in ({"a": "é"}, '{"a": "é"}'):
            call = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": arguments}}
            turn = {"role": "assistant", "tool_calls": [call], **content}
            (sample,) = samples(name, {"messages": [user("x"), turn], "tools": TOOLS})
            ids.append((sample.input_ids, sample.loss_mask))
            (span,) = supervised(name, sample)
            assert '{"a": "é"}' in span
            assert "None" not in sample.text.split("x", 1)[1] and "{'a'" not in sample.text
    assert all(one == ids[0] for one in ids)


def test_template_that_loses_an_answer_is_a_drop():
    """An answer whose call, or whose text beside a call, the template loses is dropped, not trained empty."""
    call = {"name": "f", "arguments": {}}
    for name, content in (("smollm2", ""), ("parts", ""), ("llama3", "I call f.")):
        with pytest.raises(Drop, match="template_loses_text"):
            samples(name, {"messages": [user("x"), assistant(content, tool_calls=[call])], "tools": TOOLS})


def test_reasoning_that_is_never_closed_is_a_drop():
    """For every template, with a token for the tag or not; a cut answer may stop there (tested below)."""
    for name in TARGETS:
        with pytest.raises(Drop, match="unclosed_reasoning"):
            samples(name, {"messages": [user("x"), assistant("\n<think>I was")]})


def test_think_tags_are_no_text_of_an_answer():
    """A target that does not reason is not taught tags which its template would not write; the loss is counted."""
    for name in ("smollm2", "llama3", "parts"):
        made = loaded(name).samples(conversation({"messages": [user("x"), assistant("<think>r</think>y")]}), 999)
        assert supervised(name, made.samples[0]) == ["y" + ENDS[name]] and made.reasoning_left_out == 1


def test_template_that_rewrites_the_prompt_is_a_drop(tmp_path):
    """What stands before an answer once it is history has to be what the target was asked with."""
    folder = shutil.copytree(target_folder("parts"), tmp_path / "other")
    (folder / "chat_template.jinja").write_text(
        "{% if messages | length > 2 %}{{ messages | length }}{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    model, messages = chat.load(Target.open(folder)), [user("x"), assistant("y")]
    assert model.samples(conversation({"messages": messages}), 999).samples
    with pytest.raises(Drop, match="template_rewrites_prompt: .*y<.* stands after another text"):
        model.samples(conversation({"messages": messages * 2}), 999)


def test_answer_that_cannot_continue_its_prompt_is_a_drop():
    """Where prompt and answer would merge the answer's ids are its own; if those lose a character, it is dropped."""
    prompt, lost = "<|im_start|>assistant th", chr(min(smollm2_lost_bytes()))
    assert loaded("smollm2")._append([], chat.Turn(1, prompt, "e<|im_end|>", False), 999)
    with pytest.raises(Drop, match="unsafe_boundary: .* cannot continue .*assistant th' with 'e"):
        loaded("smollm2")._append([], chat.Turn(1, prompt, f"e{lost}<|im_end|>", False), 999)


def test_d8_template_error_is_a_drop():
    """D8: what a template raises becomes a drop with its words."""
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    with pytest.raises(Drop, match="template_rejects.*single tool-calls"):
        samples("llama3", {"messages": [user("x"), assistant("", tool_calls=[call, call])], "tools": TOOLS})


def parts(reasoning: str, text: str) -> list[dict]:
    return [{"type": "thinking", "thinking": reasoning}, {"type": "text", "text": text}]


@pytest.mark.parametrize("name", ["kimi", "qwen3", "deepseek_r1", "deepseek_v31"])
def test_d11_spellings_of_reasoning(name):
    """D11: reasoning_content, thinking and inline tags give identical ids, each answer as the server generates it."""
    fields = [
        [assistant("1", reasoning_content="I count"), assistant("2", reasoning_content="again")],
        [assistant("1", thinking="I count"), assistant("2", thinking="again")],
        [assistant("1", reasoning="I count"), assistant("2", reasoning="again")],
        [assistant("<think>I count</think>1"), assistant("<think>again</think>2")],
        [assistant(parts("I count", "1")), assistant(parts("again", "2"))],
    ]
    made = [samples(name, {"messages": [user("One?"), a, user("Two?"), b]}) for a, b in fields]
    assert all([s.input_ids for s in one] == [s.input_ids for s in made[0]] for one in made)
    assert [supervised(name, s) for s in made[0]] == EXPECTED[name]["reasoning"]
    last = samples(name, {"messages": [user("One?"), fields[0][0], user("Two?"), fields[0][1]]}, turns="last")
    assert [supervised(name, s) for s in last] == EXPECTED[name]["reasoning"][-1:]


def test_reasoning_in_other_tags(tmp_path):
    """A template that writes reasoning between tags of its own keeps it, as it writes it."""
    folder = shutil.copytree(target_folder("parts"), tmp_path / "other")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}[T]{{ m.reasoning_content }}[/T]"
        "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    model = chat.load(Target.open(folder))
    (sample,) = model.samples(conversation({"messages": [user("x"), assistant("<think>r</think>y")]}), 999).samples
    assert sample.text == "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n[T]r[/T]y<|im_end|>"


@pytest.mark.parametrize(
    ("name", "span"),
    [
        ("kimi", "2+2 is 4.\n</think>\n\nThe answer is 4.<|im_end|>"),
        ("qwen3", "<think>\n2+2 is 4.\n</think>\n\nThe answer is 4.<|im_end|>"),
        ("deepseek_r1", "2+2 is 4.\n</think>\n\nThe answer is 4.<｜end▁of▁sentence｜>"),
        ("kimi_instant", "\n\nThe answer is 4.<|im_end|>"),
    ],
)
def test_d12_orphan_close_tag(name, span):
    """D12: reasoning whose opening tag came with the prompt is split off, not put behind a second empty block."""
    row = {"messages": [user("2+2?"), assistant("2+2 is 4.\n</think>\n\nThe answer is 4.")]}
    (sample,) = samples(name, row)
    assert supervised(name, sample) == [span]
    assert sample.text.count("</think>") == 1


@pytest.mark.parametrize("name", TARGETS)
def test_d12_prompt_supplied_tokens_are_not_supervised(name):
    """D12: nothing of the generation prompt (header, think tags) has mask 1."""
    prompt = loaded(name).prompt_ids([user("x")])
    (sample,) = samples(name, {"messages": [user("x"), assistant("y")]})
    assert sample.input_ids[: len(prompt)] == prompt
    assert sample.loss_mask == [0] * len(prompt) + [1] * (len(sample.input_ids) - len(prompt))


@pytest.mark.parametrize("name", TARGETS)
def test_d15_parts_and_string(name):
    """D15: a content of one text part gives the ids of the string."""
    parts = [{"type": "text", "text": "hi"}]
    one = samples(name, {"messages": [user("hi"), assistant("hi")]})
    other = samples(name, {"messages": [user(parts), assistant(parts)]})
    assert one == other


@pytest.mark.parametrize("name", TARGETS)
def test_typed_control_tokens_never_become_structure(name):
    """A control token typed into a question, an answer or a tool's text drops the conversation by name."""
    end = ENDS[name]
    for messages in ([user(f"a {end} b"), assistant("y")], [user("a"), assistant(f"y{end}z")]):
        with pytest.raises(Drop, match="control_token"):
            samples(name, {"messages": messages})
    with pytest.raises(Drop, match="control_token"):
        tool = {"name": "f", "description": f"does {end}"}
        samples(name, {"messages": [user("a"), assistant("y")], "tools": [tool]})


@pytest.mark.parametrize("name", TARGETS)
def test_every_control_token_is_found(name):
    """Whatever character it starts with, and those too that an answer may hold: think tags, calls of tools."""
    for token in loaded(name).control_tokens:
        with pytest.raises(Drop, match=re.escape(f"{token!r} inside the text of a user turn")):
            samples(name, {"messages": [user(f"a{token}b"), assistant("y")]})


def test_border_inside_a_token_keeps_the_servers_prompt():
    """Where the end of a prompt and the answer would merge into one token, the prompt keeps the ids it has alone."""
    llama = loaded("llama3")
    merged = next(t for t in llama.tokenizer.get_vocab() if len(t) == 2 and t.isalpha() and t.isascii())
    header, more = f"<|eot_id|>{merged[0]}", merged[1]
    assert llama.encode(header + more) != llama.encode(header) + llama.encode(more)
    assert llama._continuation(header, more) == llama.encode(more)
    assert llama._continuation(header, more, exact=True) is None


def test_cut_answers_have_no_end():
    """An answer that a length limit cut has no end-of-turn token, also when it was cut inside its reasoning."""
    cut = {"finish_reason": "length"}
    for name, turn, span in (
        ("kimi", assistant("I was thinking"), "I was thinking"),
        ("kimi", assistant("I thought</think>and sa"), "I thought</think>and sa"),
        ("kimi", assistant("", reasoning="I was"), "I was"),
        ("qwen3", assistant("<think>\nI was"), "<think>\nI was"),
        ("qwen3", assistant("<think>\nI thought\n</think>\n\nand sa"), "<think>\nI thought\n</think>\n\nand sa"),
        ("kimi_instant", assistant("and sa"), "and sa"),
        ("llama3", assistant("and sa"), "and sa"),
    ):
        (sample,) = samples(name, {"messages": [user("x"), turn], **cut})
        assert supervised(name, sample) == [span]


def test_kimi_tool_loop_keeps_reasoning_until_the_answer():
    """In a tool loop Kimi keeps the reasoning of the calls: one sample, each answer as it was generated."""
    row = {
        "tools": TOOLS,
        "messages": [
            user("x"),
            assistant(None, reasoning="call it", tool_calls=[{"function": {"name": "f", "arguments": {}}}]),
            {"role": "tool", "content": "42"},
            assistant("It is 42", reasoning="hm"),
        ],
    }
    (sample,) = samples("kimi", row)
    call = "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    assert supervised("kimi", sample) == [
        f"call it</think>{call}<|tool_calls_section_end|><|im_end|>",
        "hm</think>It is 42<|im_end|>",
    ]
    assert loaded("kimi").encode(sample.text) == sample.input_ids


def exchanges(number: int, reasoning: bool, tools: bool) -> list[dict]:
    """Questions and short answers; with `tools`, a call among every three."""
    turns: list[dict] = [{"role": "system", "content": "s"}]
    for k in range(number):
        thought = {"reasoning": f"r{k}"} if reasoning else {}
        turns += [user(f"q{k}")]
        if tools and k % 3 == 1:
            turns += [
                assistant("", tool_calls=[{"name": "f", "arguments": {"k": k}}]),
                {"role": "tool", "content": f"t{k}"},
            ]
        turns += [assistant(f"a{k}", **thought)]
    return turns


@pytest.mark.parametrize("reasoning", [False, True])
@pytest.mark.parametrize("name", LOCAL)
def test_long_conversations_by_both_ways(name, reasoning, monkeypatch):
    """A long conversation gives the samples that whole prompts give, also where the template rewrites history."""
    tools = EXPECTED[name]["tools"] is not None
    row = {"messages": exchanges(12, reasoning, tools)}
    made = samples(name, row)
    monkeypatch.setattr(chat, "MANY_ANSWERS", 1 << 30)
    assert made == samples(name, row)
    assert sum(s.answers for s in made) == (16 if tools else 12)


@pytest.mark.parametrize("name", ["kimi", "llama3", "deepseek_v31_instant"])
def test_400_short_turns_stay_linear(name, monkeypatch):
    """400 turns are one sample; characters rendered and encoded grow with the text, not with its square."""
    model, work = loaded(name), [0]
    apply, encode = model._apply, model.encode
    monkeypatch.setattr(model, "_apply", lambda *a: counted(apply(*a)))
    monkeypatch.setattr(model, "encode", lambda text: encode(counted(text)))

    def counted(text: str) -> str:
        work[0] += len(text)
        return text

    turns = [m for k in range(200) for m in (user(f"question {k}"), assistant(f"answer {k}"))]
    (sample,) = samples(name, {"messages": turns}, max_tokens=1 << 20)
    start = "</think>" if name == "kimi" else ""
    assert supervised(name, sample) == [f"{start}answer {k}{ENDS[name]}" for k in range(200)]
    assert encode(sample.text) == sample.input_ids
    assert work[0] < 30 * len(sample.text)  # rendering every prompt whole takes 200 times the text


def test_unknown_template_setting_is_refused():
    """A misspelt --chat-template-kwargs key is named."""
    with pytest.raises(ValueError, match="knows no 'thinkin'"):
        chat.load(Target.open(target_folder("kimi")), True, {"thinkin": False})


@pytest.mark.parametrize(("tagged", "warned"), [("message['content']", False), ("'assistant\\n'", True)])
def test_generation_tags_are_compared(tmp_path, tagged, warned):
    """A template's own generation tags are compared with what the target has to say; a difference is told."""
    folder = shutil.copytree(target_folder("parts"), tmp_path / "tagged")
    text = f"{{% generation %}}{{{{ {tagged} }}}}{{% endgeneration %}}"
    plain = "{{ 'assistant\\n' }}", "{{ message['content'] }}"
    header, content = (text, plain[1]) if warned else (plain[0], text)
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}<|im_start|>{% if message['role'] == 'assistant' %}"
        f"{header}{content}{{% else %}}user\n{{{{ message['content'] }}}}{{% endif %}}<|im_end|>\n{{% endfor %}}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    described = chat.load(Target.open(folder), False).describe()
    assert ("WARNING: its generation tags mark 'assistant" in described) == warned


def test_no_template_is_refused(tmp_path: Path):
    """A tokenizer without a chat template is refused."""
    folder = shutil.copytree(target_folder("kimi"), tmp_path / "kimi")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="has no chat template"):
        chat.load(Target.open(folder), True)


def test_looking_at_a_tokenizer_says_nothing(tiny_llama):
    """Long texts are tried on it, of which a log must not say that they "will result in indexing errors"."""
    code = f"""
from pathlib import Path
from eagle3 import tokenizer
from eagle3.target import Target
tokenizer.encoder(tokenizer.load_tokenizer(Target.open(Path({str(tiny_llama)!r})), False), [])
"""
    result = stages.run("-c", code)
    assert (result.returncode, result.stdout) == (0, "")
