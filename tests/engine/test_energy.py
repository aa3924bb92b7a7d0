"""Energy meters, and the energy of requests with a fake powercap tree."""

import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_sizes import TINY

from chairlift import SamplingParams
from chairlift.config import EngineConfig
from chairlift.engine.energy import NvmlMeter, PowercapMeter
from chairlift.engine.engine import Engine
from chairlift.engine.engine_request import EngineRequest
from chairlift.errors import InvalidSetting
from chairlift.outputs import Timeline

RANGE = 262_143


class Zone:
    """A counter of a fake powercap tree, which starts over after RANGE."""

    def __init__(self, directory: Path, value: int = 0) -> None:
        directory.mkdir(parents=True)
        self.file, self.value = directory / "energy_uj", value
        (directory / "max_energy_range_uj").write_text(f"{RANGE}\n")
        self.add(0)

    def add(self, energy: int) -> None:
        self.value = (self.value + energy) % (RANGE + 1)
        # In place: the meter keeps the file open.
        with self.file.open("r+" if self.file.exists() else "w") as file:
            file.write(f"{self.value}\n")
            file.truncate()


@settings(max_examples=50, deadline=None)
@given(added=st.lists(st.tuples(st.integers(0, 1), st.integers(0, RANGE)), max_size=20))
def test_the_meter_adds_up_zones_whose_counters_start_over(tmp_path_factory, added):
    directory = tmp_path_factory.mktemp("powercap")
    zones = [Zone(directory / "intel-rapl:0", 200_000), Zone(directory / "intel-rapl:1")]
    part = Zone(directory / "intel-rapl:0:0")
    (directory / "intel-rapl").mkdir()
    meter, total = PowercapMeter(directory), 0
    for which, energy in added:
        zones[which].add(energy)
        part.add(energy)
        total += energy
        assert meter.read() == total
    meter.close()


def test_a_meter_that_cannot_be_read_is_refused_in_one_line(tmp_path, monkeypatch):
    with pytest.raises(InvalidSetting, match=r"^--energy-meter powercap: .*none: No such file or directory$"):
        PowercapMeter(tmp_path / "none")
    with pytest.raises(InvalidSetting, match=r"^--energy-meter powercap:.*: no zone there has a counter energy_uj$"):
        PowercapMeter(tmp_path)
    Zone(tmp_path / "intel-rapl:0").file.write_text("much")
    with pytest.raises(InvalidSetting, match=r"^--energy-meter powercap: .*invalid literal"):
        PowercapMeter(tmp_path)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(InvalidSetting, match="needs nvidia-ml-py"):
        NvmlMeter(1)
    for setting in ("watts", "powercap", "powercap:"):
        with pytest.raises(ValueError, match="--energy-meter: expected none, nvml or powercap:DIR"):
            EngineConfig(energy_meter=setting)


def test_nvml_reads_the_devices_that_cuda_sees(monkeypatch):
    counted = {"GPU-b": 700, 1: 50}
    fake = SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetHandleByUUID=lambda name: name,
        nvmlDeviceGetTotalEnergyConsumption=lambda device: counted[device],
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b,1,2")
    meter = NvmlMeter(2)
    counted |= {"GPU-b": 710, 1: 55}
    assert meter.read() == 15_000
    meter.close()


def test_the_energy_of_requests_and_idle_energy_sum_to_the_counter(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    zone, randomness, total = Zone(tmp_path / "powercap" / "intel-rapl:0"), random.Random(1), 0
    size = {"num_kv_blocks": 10, "block_size": 8, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    meter = f"powercap:{tmp_path / 'powercap'}"
    engine = Engine(EngineConfig(model=str(tmp_path), load_format="dummy", energy_meter=meter, **size))
    assert engine.info.energy_method == "powercap"
    timelines = []
    for tag in range(20):
        lengths = {"max_tokens": randomness.randrange(1, 20)}
        engine.add(EngineRequest.of(tag, [3] * randomness.randrange(1, 40), SamplingParams(ignore_eos=True, temperature=0.0, **lengths)))
    for step in range(10_000):
        energy = randomness.randrange(RANGE // 40, RANGE // 10)
        zone.add(energy)
        total += energy
        if step == 7:
            assert engine.abort(0) or engine.abort(19)
        output = engine.step()
        if output is None:
            break
        timelines += output.ended
        engine.check()
    engine.abort(999)  # reads the meter for a sequence that is unknown
    stats, usage = engine.stats(), engine.usage()["tenants"][""]
    assert stats.energy_uj == total - energy  # all but what was added after the last step
    assert usage["energy_uj"] + stats.idle_energy_uj == stats.energy_uj
    assert sum(timeline["energy_uj"] for timeline in timelines) <= usage["energy_uj"]
    assert all(Timeline.read(timeline).energy_joules > 0 for timeline in timelines)
    assert usage["preemptions"] > 0
    assert total > RANGE + 1, "the counter has not started over"
    engine.close()
