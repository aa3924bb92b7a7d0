import pytest

from chairlift.errors import InvalidSetting
from chairlift.server.config import ServerConfig
from chairlift.server.keys import TENANT, Tenant, read_keys


def whose(keys, *given):
    return [None if (tenant := keys.tenant(key.encode())) is None else tenant.name for key in given]


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("sk-1", {"sk-1": ""}),
        ("alice=sk-1,bob=sk-2", {"sk-1": "alice", "sk-2": "bob"}),
        ("alice=sk-1,alice=sk-2,sk-3", {"sk-1": "alice", "sk-2": "alice", "sk-3": ""}),
        ("alice=a=b", {"a=b": "alice"}),
        # Base64 ends in signs of equality: a name followed by nothing secret would be an open door.
        ("c2VjcmV0cw==", {"c2VjcmV0cw==": ""}),
        ("c2VjcmV0cyE=", {"c2VjcmV0cyE=": ""}),
    ],
)
def test_keys_may_have_tenants(text, keys):
    read = read_keys(text)
    assert read
    assert whose(read, *keys) == list(keys.values())
    assert whose(read, "", text[:-1], "alice", "alice=sk-1") == [None] * 4


@pytest.mark.parametrize(
    ("text", "operator", "operators"),
    [
        ("sk-1", None, ["sk-1"]),
        ("sk-1,sk-2", None, ["sk-1", "sk-2"]),
        ("alice=sk-1,sk-2", None, []),
        ("sk-1", "sk-3", ["sk-3"]),
        ("alice=sk-1,sk-2", "sk-3", ["sk-3"]),
        (None, "sk-3", ["sk-3"]),
    ],
)
def test_an_unnamed_key_is_the_operators_only_without_others(text, operator, operators):
    keys = read_keys(text, None, operator)
    assert [key for key in ("sk-1", "sk-2", "sk-3") if (tenant := keys.tenant(key.encode())) is not None and tenant.operator] == operators


def test_a_tenant_of_a_file_may_be_an_operator(tmp_path):
    file = tmp_path / "keys.toml"
    file.write_text('[alice]\nkey = "sk-1"\n[ops]\nkey = "sk-2"\noperator = true\n')
    keys = read_keys("ops=sk-3,sk-4", str(file))
    assert [keys.tenant(key).reader for key in (b"sk-1", b"sk-2", b"sk-3", b"sk-4")] == ["alice", None, None, ""]


def test_tenants_of_a_file_may_form_groups_that_share_cached_prompts(tmp_path):
    file = tmp_path / "keys.toml"
    file.write_text('[alice]\nkey = "sk-1"\ngroup = "team"\n[bob]\nkey = "sk-2"\ngroup = "team"\n[carol]\nkey = "sk-3"\n')
    keys = read_keys("dave=sk-4", str(file))
    names = [keys.named(tenant).cache_group for tenant in ("alice", "bob", "carol", "dave", "team", "")]
    assert [keys.tenant(key).cache_group for key in (b"sk-1", b"sk-2", b"sk-3", b"sk-4")] == names[:4]
    assert names[0] == names[1] == "team"
    assert len(set(names)) == 5, "a tenant without a group shares with nobody"
    assert not any(TENANT.fullmatch(name) for name in names[2:]), "no group can be called like theirs"
    file.write_text('[alice]\nkey = "sk-1"\n')
    keys = read_keys("bob=sk-2", str(file))
    assert {keys.named(tenant).cache_group for tenant in ("alice", "bob", "")} == {""}, "without groups all share"


@pytest.mark.parametrize("text", ["none=sk-1", "a=sk-1,other=sk-2", "another=sk-1"])
def test_names_that_stand_for_several_tenants_have_no_key(text):
    with pytest.raises(InvalidSetting, match="no tenant may be called"):
        read_keys(text)


def test_without_keys_none_is_wanted():
    assert not read_keys(None)


@pytest.mark.parametrize("text", ["", "a,", ",a", "alice=a,,bob=b", "alice=a, bob=b", "alice= a", "alice=a,bob=a"])
def test_keys_that_would_open_too_much(text):
    with pytest.raises(InvalidSetting, match="--api-key: "):
        read_keys(text)


def test_a_file_has_keys_and_limits(tmp_path, monkeypatch):
    monkeypatch.setattr("chairlift.server.keys.line_of", None)  # for each of many tenants the search would take long
    file = tmp_path / "keys.toml"
    file.write_text(
        '[alice]\nkey = "sk-1"\nweight = 4\nmax_queued = 8\nmax_requests = 16\n'
        '[bob]\nkeys = ["sk-2", "sk-3"]\n'
        '["team:7"]\nkey = "sk-4"\nkeys = ["sk-5"]\n'
    )
    keys = read_keys("alice=sk-6,sk-7", str(file))
    assert whose(keys, *(f"sk-{i}" for i in range(1, 9))) == ["alice", "bob", "bob", "team:7", "team:7", "alice", "", None]
    alice = Tenant("alice", weight=4, max_queued=8, max_requests=16, has_key=True, cache_group="")
    assert keys.tenant(b"sk-1") == keys.tenant(b"sk-6") == alice
    assert {tenant.name for tenant in keys} == {"alice", "bob", "team:7"}


SECRET = "sk-hush"
FILES = {
    "nothing": ("", "it has no keys"),
    "no TOML": (f'[alice]\nkey = "{SECRET}', r"it is not TOML \(at end of document\); write"),
    "a key as a name": (f'{SECRET} = "alice"', r"keys\.toml, line 1: expected one table a tenant"),
    "a bad name": (f'["a b"]\nkey = "{SECRET}"', r"keys\.toml, line 1: expected one table a tenant"),
    "no key": ("[alice]\nweight = 1", r"keys\.toml, line 1: \[alice\] needs key = "),
    "a number for a key": ("[alice]\nkey = 1", r"keys\.toml, line 1: \[alice\] needs key = "),
    "one for several": (f'[alice]\nkeys = "{SECRET}"', r"keys\.toml, line 1: \[alice\] needs key = "),
    "an empty key": ('[alice]\nkey = ""', r"keys\.toml, line 1: \[alice\]: a key must not be empty"),
    "a key with a space": (
        f'[alice]\nkey = "{SECRET} "',
        r"keys\.toml, line 1: \[alice\]: a key must not be empty, begin or end with a space",
    ),
    "a key with a line": (f'[alice]\nkey = "{SECRET}\\nx"', r"keys\.toml, line 1: \[alice\]: a key must not .*control characters"),
    "a key twice": (f'[alice]\nkey = "{SECRET}"\n[bob]\nkey = "{SECRET}"', r"keys\.toml, line 3: \[bob\]: the same key is there twice"),
    "a typing error": (
        f'[alice]\nkey = "{SECRET}"\nmax_queue = 3',
        r"keys\.toml, line 3: \[alice\] has max_queue; it may have key, keys, weight",
    ),
    "a key as a setting": (f'[alice]\n{SECRET} = "key"', r"keys\.toml, line 2: \[alice\] has an unknown setting; it may have"),
    "no weight": (
        f'[alice]\nkey = "{SECRET}"\nweight = 0',
        r"keys\.toml, line 3: \[alice\]: weight must be a whole number from 1 to 10000",
    ),
    "half a request": (
        f'[alice]\nkey = "{SECRET}"\nmax_requests = 1.5',
        r"keys\.toml, line 3: \[alice\]: max_requests must be a whole number",
    ),
    "one operator": (f'[alice]\nkey = "{SECRET}"\noperator = 1', r"keys\.toml, line 3: \[alice\]: operator must be true or false"),
    "a bad group": (f'[alice]\nkey = "{SECRET}"\ngroup = "a b"', r"keys\.toml, line 3: \[alice\]: group must be a name"),
    "an unknown tier": (
        f'[alice]\nkey = "{SECRET}"\ntiers = ["gold"]',
        r"keys\.toml, line 3: \[alice\]: tiers must be a list of priority, default, flex",
    ),
    "one tier": (f'[alice]\nkey = "{SECRET}"\ntiers = "flex"', r"keys\.toml, line 3: \[alice\]: tiers must be a list"),
    "a reserved name": (f'[other]\nkey = "{SECRET}"', r"keys\.toml, line 1: \[other\]: no tenant may be called other"),
    "true": (f'[alice]\nkey = "{SECRET}"\nmax_queued = true', r"keys\.toml, line 3: \[alice\]: max_queued must be a whole number"),
}


@pytest.mark.parametrize(("text", "message"), FILES.values(), ids=FILES.keys())
def test_a_file_that_is_wrong_is_named_and_its_keys_are_not(tmp_path, text, message):
    file = tmp_path / "keys.toml"
    file.write_text(text)
    with pytest.raises(InvalidSetting, match=message) as caught:
        read_keys(None, str(file))
    assert str(caught.value).startswith(f"--api-key-file {file}")
    assert "hush" not in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(InvalidSetting, match="it cannot be read: No such file"):
        read_keys(None, str(tmp_path / "nothing"))
    (tmp_path / "latin").write_bytes(b"[\xe4]")
    with pytest.raises(InvalidSetting, match="it is not UTF-8"):
        read_keys(None, str(tmp_path / "latin"))


def test_settings_do_not_show_a_key():
    assert SECRET not in repr(ServerConfig(api_key=SECRET))


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o400, False), (0o644, True), (0o640, True), (0o604, True)])
def test_a_file_that_others_may_read_is_warned_of(tmp_path, caplog, mode, warned):
    file = tmp_path / "keys.toml"
    file.write_text(f'[alice]\nkey = "{SECRET * 4}"\n')
    file.chmod(mode)
    read_keys(None, str(file))
    assert ["chmod 600" in record.getMessage() for record in caplog.records] == [True] * warned


def test_short_keys_are_warned_of_and_not_shown(caplog):
    read_keys(f"alice={'a' * 15},bob={'b' * 16}")
    [record] = caplog.records
    assert record.getMessage().startswith("1 API key(s) of fewer than 16 characters")
    assert "aaa" not in record.getMessage()


def test_the_groups_are_the_tenants_with_keys_and_all_others_together():
    assert read_keys("alice=k1,bob=k2,k3", None, "k4").groups == {"alice", "bob", ""}
    assert read_keys("alice=k1").groups == {"alice"}
    assert read_keys(None).groups == frozenset()
