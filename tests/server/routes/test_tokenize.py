import openai
import pytest
from server_here import MODEL

pytestmark = pytest.mark.shared_server


def test_a_text_becomes_tokens_and_text_again(http):
    reported = http.post("/tokenize", json={"model": MODEL, "prompt": "añb", "add_special_tokens": False, "return_token_strs": True}).json()
    assert reported == {
        "count": 4,
        "max_model_len": 2048,
        "tokens": [97, 195, 177, 98],
        "token_strs": ["a", r"bytes:\xc3", r"bytes:\xb1", "b"],
    }
    assert http.post("/detokenize", json={"tokens": reported["tokens"]}).json() == {"prompt": "añb"}
    assert http.post("/detokenize", json={"tokens": [0, 97]}).json() == {"prompt": "\0a"}  # the first is a control token
    assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    assert http.post("/tokenize", json={"prompt": ""}).json()["token_strs"] is None


def test_a_conversation_becomes_what_the_model_would_be_given(http, client):
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "brief"}]
    reported = http.post("/tokenize", json={"messages": messages, "add_generation_prompt": True}).json()
    assert bytes(reported["tokens"]) == b"be brief"
    assert client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1).usage.prompt_tokens == reported["count"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"prompt": [1]}, "prompt"),
        ("/tokenize", {"prompt": "a" * ((1 << 20) + 1)}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [65536]}, "tokens"),
        ("/detokenize", {"tokens": [1] * ((1 << 18) + 1)}, "tokens"),
    ],
)
def test_what_is_neither(http, path, body, param):
    response = http.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert len(response.content) < 1000


def test_clients_that_tokenize_themselves_find_what_they_need(http):
    info = http.get("/tokenizer_info").json()
    assert info["eos_token"] == "<eos>"
    assert info["chat_template"]
    assert info["vocab_size"] == 65536


def test_models_are_listed_and_found_by_name(http, client):
    [model] = client.models.list().data
    assert (model.id, model.object, model.owned_by, model.max_model_len) == (MODEL, "model", "chairlift", 2048)
    assert client.models.retrieve(MODEL) == model
    assert http.get("/v1/models/other").json()["error"]["code"] == "model_not_found"


def test_embeddings_are_refused_in_clear_words(client):
    with pytest.raises(openai.BadRequestError, match="generates text") as refused:
        client.embeddings.create(model=MODEL, input="a")
    assert refused.value.code == "unsupported"
