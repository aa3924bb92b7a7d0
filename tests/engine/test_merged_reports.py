"""The counters and limits of several engines as those of one."""

from chairlift.engine.merged_reports import merged_facts, merged_stats


def test_counters_are_summed_and_predictions_are_not():
    first = {
        "running": 2,
        "saturation": 0.5,
        "predicted_wait_us": 9,
        "predicted_step_us": 3,
        "tenants": {"a": {"waiting": 1}},
        "energy_uj": None,
    }
    second = {
        "running": 1,
        "saturation": 1.5,
        "predicted_wait_us": 4,
        "predicted_step_us": 7,
        "tenants": {"a": {"waiting": 2}, "b": {"waiting": 5}},
    }
    second |= {"energy_uj": None, "accepted_draft_tokens_by_position": [3, 1]}
    assert merged_stats([first, {}, second]) == {
        "running": 3,
        "saturation": 1.0,
        "predicted_wait_us": 4,
        "predicted_step_us": 7,
        "tenants": {"a": {"waiting": 3}, "b": {"waiting": 5}},
        "energy_uj": None,
        "accepted_draft_tokens_by_position": [3, 1],
    }
    assert merged_stats([{}, first]) == first
    assert merged_stats([{}, {}]) == {}
    assert first["tenants"] == {"a": {"waiting": 1}}, "reports are left as they are"


def test_a_request_must_fit_into_every_engine():
    first = {"max_model_len": 512, "max_text_len": None, "num_kv_blocks": 10, "num_bytes": 3, "max_num_seqs": 4, "fingerprint": "f"}
    assert merged_facts([first, first | {"max_model_len": 256, "num_kv_blocks": 5}]) == first | {
        "max_model_len": 256,
        "num_kv_blocks": 15,
        "num_bytes": 6,
        "max_num_seqs": 8,
    }
