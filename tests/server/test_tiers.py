from dataclasses import replace

import pytest

from chairlift.errors import InvalidRequest, InvalidSetting
from chairlift.scheduling import Scheduling
from chairlift.server.keys import Keys, Tenant
from chairlift.server.tiers import ServiceTiers, Tier, read_tiers


def written(tmp_path, text):
    file = tmp_path / "tiers.toml"
    file.write_text(text, encoding="utf-8")
    return str(file)


def test_without_a_file_every_tenant_may_use_every_tier():
    tiers = read_tiers(None)
    assert tiers == ServiceTiers()
    assert [tiers.choose(asked, "a") for asked in (None, "auto", "scale", "default", "flex", "priority")] == [
        *("default", "default", "default", "default", "flex", "priority")
    ]
    assert tiers.weights == {"priority": 4, "default": 2, "flex": 1}


def test_a_file_changes_what_it_names(tmp_path):
    tiers = read_tiers(written(tmp_path, '[priority]\ntenants = ["alice"]\nttft_ms = 500\nweight = 9\n[default]\nitl_ms = 50.5\n'))
    assert tiers.tiers == {"priority": Tier(9, frozenset({"alice"}), 500), "default": Tier(2, None, None, 50.5), "flex": Tier(1)}
    assert [tiers.choose("priority", tenant) for tenant in ("alice", "bob", "")] == ["priority", "default", "default"]


NAMED = Keys([("1", Tenant("alice")), ("2", Tenant("bob", tiers=frozenset({"priority", "flex"}))), ("3", Tenant("carol", operator=True))])
ANYBODY = ("alice", "bob", "carol", "", "invented")


def may_use(tiers, tier):
    return [tenant for tenant in ANYBODY if tiers.choose(tier, tenant) == tier]


def test_with_keys_the_tier_priority_is_granted():
    assert may_use(ServiceTiers(), "priority") == may_use(ServiceTiers().granted(Keys()), "priority") == [*ANYBODY]
    assert may_use(ServiceTiers().granted(Keys([("1", Tenant(operator=True))])), "priority") == [""], "the owner of the only key"
    tiers = ServiceTiers().granted(NAMED)
    assert (may_use(tiers, "priority"), may_use(tiers, "flex")) == (["bob"], [*ANYBODY])


def test_a_tier_is_granted_by_either_file(tmp_path):
    tiers = read_tiers(written(tmp_path, '[priority]\ntenants = ["alice"]\n[flex]\ntenants = ["carol"]\n')).granted(NAMED)
    assert (may_use(tiers, "priority"), may_use(tiers, "flex")) == (["alice", "bob"], ["bob", "carol"])
    assert tiers.weights == ServiceTiers().weights


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair", "deadline", "shortest", "prefix", "vtc"])
def test_with_keys_fields_claim_no_urgency_without_the_grant(policy):
    tiers = ServiceTiers().granted(NAMED)
    hasty = Scheduling(tenant="alice", priority=-5, predicted_tokens=1)
    assert tiers.bound(hasty, policy) == Scheduling(tenant="alice", predicted_tokens=None if policy == "shortest" else 1)
    assert tiers.bound(replace(hasty, tenant="bob"), policy) == replace(hasty, tenant="bob")
    assert ServiceTiers().bound(hasty, policy) == hasty, "without keys"
    modest = Scheduling(tenant="alice", priority=7)
    assert tiers.bound(modest, policy) == modest
    for deadline in ({"deadline_ms": 5.0}, {"ttft_deadline_ms": 5.0}):
        late = Scheduling(tenant="alice", **deadline)
        if policy == "deadline":
            with pytest.raises(InvalidRequest, match="leave the deadline out"):
                tiers.bound(late, policy)
        else:
            assert tiers.bound(late, policy) == late
        assert tiers.bound(replace(late, tenant="bob"), policy) == replace(late, tenant="bob")


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("[gold]\n", 1, r"expected the tables \[priority\], \[default\], \[flex\], got 'gold'"),
        ("\npriority = 3\n", 2, "got 'priority'"),
        ("[flex]\n\nwieght = 3\n", 3, r"\[flex\] wieght is no setting: there are tenants, weight, ttft_ms, itl_ms"),
        ("[flex]\nweight = 1\n[priority]\nweight = 0\n", 4, r"\[priority\] weight must be a whole number from 1 to 100, got 0"),
        ("[flex]\nweight = true\n", 2, "weight must be a whole number"),
        ('[flex]\nttft_ms = "fast"\n', 2, "ttft_ms must be a number of milliseconds above 0 and at most 1e.10, got 'fast'"),
        ("[flex]\nitl_ms = inf\n", 2, "itl_ms must be a number"),
        ("[flex]\nttft_ms = nan\n", 2, "ttft_ms must be a number"),
        ("[priority]\ntenants = 'alice'\n", 2, "tenants must be a list of tenants"),
        ("[priority]\ntenants = ['a b']\n", 2, "tenants must be a list of tenants"),
        ("[default]\ntenants = []\n", 2, r"\[default\] tenants is not allowed: every tenant may use the default tier"),
    ],
)
def test_a_wrong_setting_is_named_with_its_line(tmp_path, text, line, message):
    with pytest.raises(InvalidSetting, match=rf"^--tiers .*tiers\.toml, line {line}: .*{message}"):
        read_tiers(written(tmp_path, text))


def test_a_file_that_is_no_toml_or_is_missing(tmp_path):
    with pytest.raises(InvalidSetting, match=r"it is not TOML: .*line 2"):
        read_tiers(written(tmp_path, "[flex]\nweight 3\n"))
    with pytest.raises(InvalidSetting, match="it cannot be read: No such file"):
        read_tiers(str(tmp_path / "nothing"))
