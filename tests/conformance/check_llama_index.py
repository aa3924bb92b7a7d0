"""llama-index's OpenAILike: chats and completions, whole and streamed."""

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike


@pytest.fixture
def llm(quick, key, model):
    settings = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 512}
    return OpenAILike(model=model, api_base=f"{quick}/v1", api_key=key, max_tokens=12, temperature=0, max_retries=0, **settings)


def test_a_chat_whole_and_streamed(llm):
    messages = [ChatMessage(role="user", content="Say hello.")]
    whole = llm.chat(messages).message.content
    assert whole
    assert [part.message.content for part in llm.stream_chat(messages)][-1] == whole


def test_a_completion_whole_and_streamed(llm):
    llm.is_chat_model = False
    assert llm.complete("Once upon").text == [part.text for part in llm.stream_complete("Once upon")][-1]
