"""What a whole server must not tell: keys in its log, and paths of its machine to clients."""

from pathlib import Path

import pytest
from served import served, until

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_key_in_a_query_is_in_no_log_and_no_answer(form: str) -> None:
    with served("--log-level", "info", "--log-format", form, "--api-key", "sk-1") as server:
        assert server.http.get("/v1/models?api_key=sk-hush").status_code == 401
        for path in ("/v1/nothing", "/dashboard/data?step=x", "/v1/models/nothing"):
            answer = server.http.get(path + ("&" if "?" in path else "?") + "api_key=sk-hush", headers={"x-api-key": "sk-1"})
            assert answer.status_code in (400, 404)
            assert "sk-hush" not in answer.text
        until(lambda: "/v1/models/nothing" in server.log())
        assert "sk-hush" not in server.log()
        assert "/v1/models?api_key=[redacted]" in server.log()


def test_clients_see_the_name_of_a_local_model_and_not_its_path(byte_model: Path) -> None:
    with served(str(byte_model)) as server:
        [model] = server.http.get("/v1/models").json()["data"]
        assert model["id"] == model["root"] == byte_model.name
        for path in ("/", "/v1/models", f"/v1/models/{byte_model.name}", "/openapi.json", "/metrics", "/dashboard/data", "/tokenizer_info"):
            answer = server.http.get(path)
            assert answer.status_code == 200
            assert str(byte_model.parent) not in answer.text
        assert server.answer(model=byte_model.name)
        refused = server.http.post("/v1/completions", json={"prompt": "a", "model": str(byte_model.parent / "other")})
        assert refused.json()["error"]["message"].endswith(f"does not exist; this server has {byte_model.name!r}")
    with served(str(byte_model), "--served-model-name", "org/bytes") as server:
        assert [model["id"] for model in server.http.get("/v1/models").json()["data"]] == ["org/bytes"]
        assert server.answer(model="org/bytes")
