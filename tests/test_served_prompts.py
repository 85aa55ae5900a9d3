"""The prompts that vLLM's own renderer makes of a request are ours, token for token."""

from functools import cache

import pytest
from chat_targets import TARGETS, TOOLS, assistant, target_folder, user

from eagle3 import chat
from eagle3.conversations import parse
from eagle3.sources import Raw
from eagle3.target import Target

CALL = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": "é"}'}}
RESULT = {"role": "tool", "tool_call_id": "functions.f:0", "content": [{"type": "text", "text": "42"}]}
REQUESTS = {
    "plain": {"messages": [user("Grüße 你好\n\n")]},
    "system": {"messages": [{"role": "system", "content": "s"}, user("a"), assistant("b"), user("c")]},
    "reasoning": {"messages": [user("a"), assistant("b", reasoning="r"), user("c")]},
    "parts": {"messages": [user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])]},
    "developer": {"messages": [{"role": "developer", "content": "d"}, user("a")]},
    "late developer": {
        "messages": [{"role": "system", "content": "s"}, user("a"), {"role": "developer", "content": "d"}]
    },
    "tools": {
        "messages": [user("a"), assistant(None, reasoning="r", tool_calls=[CALL]), RESULT],
        "tools": [
            *TOOLS,
            {"type": "function", "function": {"name": "g", "parameters": {"z": 1, "y": 2}, "strict": True}},
        ],
    },
}


@pytest.fixture(scope="module")
def render(tiny_llama):
    """A function from a target's name and a request to the prompt's ids, by vLLM's chat request and renderer."""
    from vllm.config import ModelConfig, VllmConfig
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.renderers import ChatParams
    from vllm.renderers.hf import HfRenderer
    from vllm.tokenizers import get_tokenizer

    config = VllmConfig(model_config=ModelConfig(model=str(tiny_llama)))

    @cache
    def renderer(name: str) -> HfRenderer:
        return HfRenderer(config, get_tokenizer(str(target_folder(name)), trust_remote_code=True))

    def prompt_ids(name: str, request: dict) -> list[int]:
        sent = ChatCompletionRequest(**request)
        tools = [tool.model_dump() for tool in sent.tools] if sent.tools else None
        kwargs = {"add_generation_prompt": True, "tools": tools, **TARGETS[name][1]}
        _, (prompt,) = renderer(name).render_chat([sent.messages], ChatParams(chat_template_kwargs=kwargs))
        return list(prompt["prompt_token_ids"])

    return prompt_ids


@pytest.mark.parametrize("request_name", REQUESTS)
@pytest.mark.parametrize("name", TARGETS)
def test_prompts_are_the_servers(render, name, request_name):
    """prompt_ids of a conversation equals the prompt that vLLM's server gives its engine for the same request."""
    request = REQUESTS[request_name]
    row = parse(Raw("request", 1, dict(request)))
    model = chat.load(Target.open(target_folder(name)), True, TARGETS[name][1])
    assert model.prompt_ids(row.messages, row.tools) == render(name, request)
