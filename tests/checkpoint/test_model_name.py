import pytest

from chairlift.checkpoint.model_name import FileAddress, HubName, is_hub_name, is_revision, parse_name
from chairlift.errors import ModelNotFound


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("org/repo", HubName("org/repo")),
        ("org/repo-1.5-GGUF:Q4_K_M", HubName("org/repo-1.5-GGUF", "Q4_K_M")),
        ("hf.co/org/repo:IQ4_XS", HubName("org/repo", "IQ4_XS")),
        ("huggingface.co/org/repo", HubName("org/repo")),
        ("hf.co/org/repo:latest", HubName("org/repo")),
        ("hf.co/repo", HubName("hf.co/repo")),
        ("hf://org/repo:Q8_0", HubName("org/repo", "Q8_0")),
        ("hf:org/repo", HubName("org/repo")),
        ("huggingface:org/repo:Q8_0", HubName("org/repo", "Q8_0")),
        ("org/repo@v1.0", HubName("org/repo", revision="v1.0")),
        ("hf://org/repo@v1.0/Q8_0/a.gguf", HubName("org/repo", file="Q8_0/a.gguf", revision="v1.0")),
        ("org/repo@4_0:Q8_0", HubName("org/repo", "Q8_0", revision="4_0")),
        ("org/repo@q4_k_m", HubName("org/repo", "q4_k_m")),
        ("org/repo@BF16", HubName("org/repo", "BF16")),
        ("org/repo:model-Q8_0.GGUF", HubName("org/repo", "model-Q8_0")),
        ("https://huggingface.co/org/repo/raw/main/m.gguf", HubName("org/repo", file="m.gguf", revision="main")),
        ("org/repo/Q8_0/model-Q8_0.gguf", HubName("org/repo", file="Q8_0/model-Q8_0.gguf")),
        ("https://huggingface.co/org/repo", HubName("org/repo")),
        ("https://hf.co/org/repo:Q8_0", HubName("org/repo", "Q8_0")),
        ("https://huggingface.co/org/repo/tree/v1.0", HubName("org/repo", revision="v1.0")),
        ("https://huggingface.co/org/repo/blob/main/a.gguf", HubName("org/repo", file="a.gguf", revision="main")),
        (
            "https://huggingface.co/org/repo/resolve/refs%2Fpr%2F1/Q8_0/a.gguf?download=true",
            HubName("org/repo", file="Q8_0/a.gguf", revision="refs/pr/1"),
        ),
        ("https://example.com/a%20b/c.gguf?key=1", FileAddress("https://example.com/a%20b/c.gguf?key=1", "c.gguf")),
        ("http://127.0.0.1:9/c.gguf", FileAddress("http://127.0.0.1:9/c.gguf", "c.gguf")),
    ],
)
def test_names(text: str, name: object) -> None:
    assert parse_name(text) == name


def test_the_address_of_another_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example/hub/")
    assert parse_name("https://mirror.example/hub/org/repo/resolve/main/a.gguf") == HubName("org/repo", file="a.gguf", revision="main")
    assert isinstance(parse_name("https://elsewhere.example/org/repo/resolve/main/a.gguf"), FileAddress)


NO_NAMES = ["gpt2", "", "a/b/c", "../a", "./a/b", "/a/b", "a/..", "org/na me", "~/m", "a/b:c:d", "a/b@", "a/b@..", "file:///a/b"]
NO_NAMES += ["C:\\a\\b", "a/b\n"]


@pytest.mark.parametrize("text", NO_NAMES)
def test_what_is_no_name(text: str) -> None:
    assert parse_name(text) is None
    assert not is_hub_name(text)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://example.com/a.gguf", "must begin with https://"),
        ("https://user:password@example.com/a.gguf", "no user and no password"),
        ("https://example.com/", "names no file"),
        ("https://example.com/a/..", "names no file"),
        ("https://[example.com/a.gguf", "is not valid"),
        ("https://huggingface.co/datasets/org/repo/tree/main", "is no page of a model"),
        ("https://huggingface.co/org", "is no page of a model"),
        ("https://huggingface.co/org/repo/blob/main/model.safetensors", "is no GGUF file: name the model as org/repo"),
    ],
)
def test_addresses_that_cannot_be_used(url: str, reason: str) -> None:
    with pytest.raises(ModelNotFound, match=reason) as caught:
        parse_name(url)
    assert "password@" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "good"), [("main", True), ("refs/pr/1", True), ("v1.0", True), ("../a", False), ("/a", False), ("", False)]
)
def test_revisions(text: str, good: bool) -> None:
    assert is_revision(text) == good
