"""Records a run of the scheduler, checks its decisions, and simulates other settings. Needs no model."""

import tempfile
from pathlib import Path

from chairlift import LLM, SamplingParams
from chairlift.sim.replay import Recording

with tempfile.TemporaryDirectory() as folder:
    journal = Path(folder) / "day.journal"
    with LLM(load_format="none", max_num_seqs=8, max_model_len=512, journal=str(journal)) as llm:
        llm.generate([[7] * length for length in range(10, 90)], SamplingParams(max_tokens=64), progress=False)
    recording = Recording(journal)

replay = recording.replay()
print(f"{replay.calls} calls, {'every decision is equal' if replay.differs_at is None else 'a decision differs'}")
for slots in (4, 8, 16, 32):
    result = recording.what_if({"max_seqs": slots})
    print(f"max_num_seqs {slots:2}: {result.steps:4} steps, {result.ttft().mean() * 1e3:7.1f} ms mean TTFT")
