import numpy as np
import pytest
import torch

from chairlift.runner.interface import NewSequence
from chairlift.runner.sampling.device import DeviceSampler
from chairlift.sampling import MAX_LOGPROBS, SamplingParams

pytest.importorskip("triton", reason="Triton is not made for this platform")

from chairlift.kernels.sampling import gumbel, logprobs, penalties, threshold

DRAW = ["_draw_kernel", "_choose_kernel"]
CUT = ["_sum_kernel"] * 6 + ["_least_kernel"]


@pytest.fixture
def launched(monkeypatch):
    """The names of the kernels that were launched, none of which runs."""
    names: list[str] = []

    class Silent:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: object):
            return lambda *args, **kwargs: names.append(self.name)

    for module in (gumbel, logprobs, penalties, threshold):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Silent(name))
    return names


@pytest.mark.parametrize(
    ("ways", "expected"),
    [
        ([{"temperature": 0.0, "top_k": 5}, {"top_k": 1}], DRAW),
        ([{}, {"temperature": 0.0, "top_p": 0.5}], DRAW),
        ([{}, {"top_p": 0.9}], CUT + DRAW),
        ([{"min_p": 0.1}], CUT + DRAW),
        ([{"presence_penalty": 1.0}, {"temperature": 0.0}], ["_penalise_kernel", *DRAW]),
        ([{"repetition_penalty": 1.1, "top_k": 3}], ["_penalise_kernel", *CUT, *DRAW]),
    ],
)
def test_a_step_launches_what_its_rows_need_and_waits_for_nothing(launched, ways, expected):
    # Tensors on this device have no numbers: whoever asks for one raises.
    meta = torch.device("meta")
    with pytest.raises(RuntimeError):
        torch.zeros(1, device=meta).item()
    made = DeviceSampler(len(ways), 1000, meta)
    for row, way in enumerate(ways):
        made.add_request(row, NewSequence(SamplingParams(**way), np.array([1, 2, 2], dtype=np.int32), 1, row))
    rows, logits = np.arange(len(ways)), torch.zeros(len(ways), 1000, device=meta)
    ours = torch.zeros(len(ways), dtype=torch.int32, device=meta)
    tokens = made.sample(logits, ours, ours, made.prepare(rows))
    assert (tokens.shape, tokens.dtype, tokens.device) == (ours.shape, torch.int32, meta)
    assert launched == expected
    lines = made.score_rows(logits, torch.zeros(1, dtype=torch.int64, device=meta), tokens, 4)
    assert (lines.shape, lines.dtype) == ((1, 11), torch.int32)


def test_lines_of_any_length_use_one_compiled_kernel(monkeypatch):
    constants = []

    class Noting:
        def __getitem__(self, grid: object):
            return lambda *args, **kwargs: constants.append(kwargs)

    monkeypatch.setattr(logprobs, "_part_kernel", Noting())
    monkeypatch.setattr(logprobs, "_line_kernel", Noting())
    assert logprobs.MAX_COUNT == MAX_LOGPROBS
    logits, places = torch.zeros(2, 128256), torch.arange(2)
    for count in range(MAX_LOGPROBS + 1):
        logprobs.score(logits, places, places, count)
    assert len({tuple(one.items()) for one in constants}) == 2
