"""What users of the Python SDKs get when all is well."""

from __future__ import annotations

import anthropic
import openai
import pytest

from real.clients import PROMPT
from real.test_same_as_direct import CALL_A_TOOL, STEADY
from support.llama import Llama

EXTRA = {key: STEADY[key] for key in ("seed", "cache_prompt")}


def openai_text(client: openai.OpenAI, stream: bool) -> str:
    answer = client.chat.completions.create(
        model="tiny", messages=PROMPT, max_tokens=32, temperature=0, stream=stream, extra_body=EXTRA
    )
    if not stream:
        return answer.choices[0].message.content
    return "".join(chunk.choices[0].delta.content or "" for chunk in answer)


def completions_text(client: openai.OpenAI, stream: bool) -> str:
    answer = client.completions.create(
        model="tiny", prompt="tell me", max_tokens=32, temperature=0, stream=stream, extra_body=EXTRA
    )
    return "".join(chunk.choices[0].text for chunk in answer) if stream else answer.choices[0].text


def responses_text(client: openai.OpenAI, stream: bool) -> str:
    answer = client.responses.create(
        model="tiny", input="tell me", max_output_tokens=32, temperature=0, stream=stream, extra_body=EXTRA
    )
    if not stream:
        return answer.output_text
    return "".join(event.delta for event in answer if event.type == "response.output_text.delta")


def claude_text(client: anthropic.Anthropic, stream: bool) -> str:
    request = {"model": "tiny", "messages": PROMPT, "max_tokens": 32, "extra_body": EXTRA | {"temperature": 0}}
    if not stream:
        return client.messages.create(**request).content[0].text
    with client.messages.stream(**request) as events:
        return "".join(events.text_stream)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("text_of", [openai_text, completions_text, responses_text])
def test_openai_text(text_of, stream: bool, chat: openai.OpenAI, llama: Llama):
    plain = chat.with_options(base_url=f"{llama.url}/v1")
    assert text_of(chat, stream) == text_of(plain, stream) != ""


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_claude_text(stream: bool, claude: anthropic.Anthropic, llama: Llama):
    plain = claude.with_options(base_url=llama.url)
    assert claude_text(claude, stream) == claude_text(plain, stream) != ""


@pytest.mark.parametrize("wanted", [False, True], ids=["not asked for", "asked for"])
def test_usage_on_the_stream_as_asked_for(wanted: bool, chat: openai.OpenAI):
    """User code indexes `choices[0]`: a usage chunk must not reach those who did not ask."""
    options = {"stream_options": {"include_usage": True}} if wanted else {}
    chunks = list(chat.chat.completions.create(model="tiny", messages=PROMPT, max_tokens=9, stream=True, **options))
    without_choices = [chunk for chunk in chunks if not chunk.choices]
    assert [chunk.usage.completion_tokens for chunk in without_choices] == ([9] if wanted else [])
    assert all(chunk.usage is None for chunk in chunks if chunk.choices)


def test_usage_of_a_whole_answer(chat: openai.OpenAI, claude: anthropic.Anthropic):
    answer = chat.chat.completions.create(model="tiny", messages=PROMPT, max_tokens=9)
    assert answer.usage.completion_tokens == 9
    assert answer.usage.total_tokens == 9 + answer.usage.prompt_tokens
    assert claude.messages.create(model="tiny", messages=PROMPT, max_tokens=9).usage.output_tokens == 9


def test_tool_calls_whole(chat: openai.OpenAI):
    extra = EXTRA | {"logit_bias": CALL_A_TOOL["logit_bias"]}
    answer = chat.chat.completions.create(
        model="tiny",
        messages=PROMPT,
        max_tokens=120,
        temperature=0,
        tools=CALL_A_TOOL["tools"],
        tool_choice="required",
        extra_body=extra,
    )
    calls = answer.choices[0].message.tool_calls
    assert {call.function.name for call in calls} == {"weather"}


def test_tool_calls_on_the_stream(chat: openai.OpenAI):
    """The SDK's accumulator puts the pieces of two calls together."""
    with chat.chat.completions.stream(
        model="tiny",
        messages=PROMPT,
        max_tokens=120,
        temperature=0,
        tools=CALL_A_TOOL["tools"],
        tool_choice="required",
        extra_body=EXTRA | {"logit_bias": CALL_A_TOOL["logit_bias"]},
    ) as events:
        done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [(call.name, call.arguments) for call in done][:1] == [("weather", '{ "city" : "Rome"}')]


def test_a_conversation_with_a_tool_result(chat: openai.OpenAI):
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        *PROMPT,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    answer = chat.chat.completions.create(model="tiny", messages=messages, max_tokens=5, tools=CALL_A_TOOL["tools"])
    assert answer.usage.completion_tokens == 5


def test_models(chat: openai.OpenAI):
    assert "tiny" in [model.id for model in chat.models.list()]


def test_embeddings(chat: openai.OpenAI):
    """The SDK asks for base64 and decodes it."""
    assert len(chat.embeddings.create(model="tiny", input="hello").data[0].embedding) == 64


@pytest.mark.gateway
def test_request_ids_are_where_the_sdks_look(chat: openai.OpenAI, claude: anthropic.Anthropic):
    assert chat.chat.completions.create(model="tiny", messages=PROMPT, max_tokens=1)._request_id
    assert claude.messages.create(model="tiny", messages=PROMPT, max_tokens=1)._request_id
    with pytest.raises(openai.BadRequestError) as refused:
        chat.chat.completions.create(model="tiny", messages="not a list")
    assert refused.value.request_id


def test_many_calls_on_one_client(chat: openai.OpenAI):
    """Reused connections, on both sides."""
    for round in range(20):
        answer = chat.chat.completions.create(model="tiny", messages=PROMPT, max_tokens=1 + round % 3)
        assert answer.usage.completion_tokens == 1 + round % 3
