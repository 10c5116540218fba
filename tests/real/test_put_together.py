"""What users of the Python SDKs get when the gateway asks for a stream and hands on one piece."""

from __future__ import annotations

import anthropic
import httpx
import openai
import pytest

from real.clients import KEY, PROMPT
from real.test_sdk_answers import EXTRA
from support.fake import Fake
from support.gateway import Gateway

pytestmark = pytest.mark.gateway


@pytest.fixture
def openai_sdk(joined: Gateway) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{joined.url}/v1", api_key=KEY, max_retries=0)


@pytest.fixture
def anthropic_sdk(joined: Gateway) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=joined.url, api_key=KEY, max_retries=0)


def test_log_probabilities(chat: openai.OpenAI):
    """Of a real llama.cpp: one entry a token, and the text is made of them."""
    answer = chat.chat.completions.create(
        model="tiny", messages=PROMPT, max_tokens=8, temperature=0, logprobs=True, top_logprobs=2, extra_body=EXTRA
    )
    choice = answer.choices[0]
    assert len(choice.logprobs.content) == answer.usage.completion_tokens == 8
    assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
    assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)


def test_openai_tools(openai_sdk: openai.OpenAI, fake: Fake):
    script = fake.script(tool_calls=2)
    answer = openai_sdk.chat.completions.create(model="tiny", messages=PROMPT, extra_body=script.body)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert [call.function.arguments for call in choice.message.tool_calls] == ['{"city": "Paris"}'] * 2
    assert len({call.id for call in choice.message.tool_calls}) == 2
    assert answer.usage.completion_tokens > 0, "usage was asked for"


def test_anthropic_tools(anthropic_sdk: anthropic.Anthropic, fake: Fake):
    script = fake.script(tool_calls=2)
    answer = anthropic_sdk.messages.create(model="tiny", messages=PROMPT, max_tokens=50, extra_body=script.body)
    tools = [block for block in answer.content if block.type == "tool_use"]
    assert [tool.input for tool in tools] == [{"city": "Paris"}] * 2
    assert answer.stop_reason == "tool_use"
    assert answer.usage.output_tokens > 0


def test_responses(openai_sdk: openai.OpenAI, fake: Fake):
    script = fake.script(tokens=9)
    answer = openai_sdk.responses.create(model="tiny", input="tell me", extra_body=script.body)
    assert answer.status == "completed"
    assert answer.output_text
    assert answer.usage.output_tokens == 9


def test_errors_in_mid_stream_are_exceptions(openai_sdk: openai.OpenAI, anthropic_sdk: anthropic.Anthropic, fake: Fake):
    """Nothing was handed on yet: a status, not an answer that is cut short."""
    body = fake.script(error_at=3, message="the GPU fell off").body
    with pytest.raises(openai.APIStatusError, match="the GPU fell off") as caught:
        openai_sdk.chat.completions.create(model="tiny", messages=PROMPT, extra_body=body)
    assert caught.value.status_code >= 500
    with pytest.raises(anthropic.APIStatusError, match="the GPU fell off") as caught:
        anthropic_sdk.messages.create(model="tiny", messages=PROMPT, max_tokens=50, extra_body=body)
    assert caught.value.status_code >= 500


@pytest.mark.parametrize("end", ["fin", "rst", "clean"])
def test_a_cut_is_an_exception(end: str, openai_sdk: openai.OpenAI, fake: Fake):
    body = fake.script(tokens=20, end=end, end_at=5).body
    with pytest.raises(openai.InternalServerError, match="broke off") as caught:
        openai_sdk.chat.completions.create(model="tiny", messages=PROMPT, extra_body=body)
    assert caught.value.status_code == 502


def test_a_timeout_ends_the_work(openai_sdk: openai.OpenAI, fake: Fake):
    script = fake.script(tokens=100_000, pace_ms=5)
    with pytest.raises((openai.APITimeoutError, httpx.ReadTimeout)):
        openai_sdk.with_options(timeout=0.5).chat.completions.create(
            model="tiny", messages=PROMPT, extra_body=script.body
        )
    assert script.wait_left()["tokens"] < 2000
