"""The counters of the core have fields, and those of several engines are merged."""

from chairlift.checkpoint.info import CheckpointInfo
from chairlift.config import EngineConfig
from chairlift.engine.engine import Engine
from chairlift.engine.engine_info import EngineInfo
from chairlift.engine.frames import Ready, decode, encode
from chairlift.engine.stats import Stats


def test_every_counter_of_the_engine_has_a_field(byte_model):
    engine = Engine(EngineConfig(model=str(byte_model), load_format="none", speculative_config={"method": "ngram"}))
    try:
        assert engine.stats().slots == engine.info.max_num_seqs
        assert {"tenants", "classes"} == engine.usage().keys()
    finally:
        engine.close()


def test_counters_are_summed_and_predictions_are_not():
    first = Stats(
        slots=4, running=2, saturation=0.5, predicted_wait_us=9, predicted_step_us=3, tenants={"a": {"waiting": 1}}, stall="blocks"
    )
    second = Stats(
        slots=8,
        running=1,
        saturation=1.5,
        predicted_wait_us=4,
        predicted_step_us=7,
        tenants={"a": {"waiting": 2}, "b": {"waiting": 5}},
        accepted_draft_tokens_by_position=[3, 1],
    )
    assert Stats.merged([first, Stats(), second]) == Stats(
        slots=12,
        running=3,
        saturation=1.0,
        predicted_wait_us=4,
        predicted_step_us=7,
        tenants={"a": {"waiting": 3}, "b": {"waiting": 5}},
        accepted_draft_tokens_by_position=[3, 1],
        stall="blocks",
    )
    assert Stats.merged([Stats(), first]) == first
    assert Stats.merged([Stats(), Stats()]) == Stats()
    assert first.tenants == {"a": {"waiting": 1}}, "reports are left as they are"


def test_a_request_must_fit_into_every_engine():
    first = EngineInfo(max_model_len=512, num_kv_blocks=10, num_bytes=3, max_num_seqs=4, fingerprint="f")
    second = EngineInfo(max_model_len=256, num_kv_blocks=5, num_bytes=3, max_num_seqs=4, fingerprint="f")
    merged = EngineInfo(max_model_len=256, num_kv_blocks=15, num_bytes=6, max_num_seqs=8, fingerprint="f")
    assert EngineInfo.merged([first, second]) == merged
    assert EngineInfo.merged([EngineInfo(max_text_len=9), EngineInfo(max_text_len=8)]).max_text_len == 8


def test_a_description_arrives_as_it_was_sent():
    info = EngineInfo(
        model="m", checkpoint=CheckpointInfo("LlamaForCausalLM", 9), adapter_digests={"a": "ff"}, decisions=[["device", "cpu", ""]]
    )
    _, frame = decode(encode(Ready(info.pack()))[8:])
    assert EngineInfo.unpack(frame.info) == info
