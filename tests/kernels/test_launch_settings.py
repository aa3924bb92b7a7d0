from itertools import product

import pytest

pytest.importorskip("triton", reason="Triton is not made for this platform")

from chairlift.kernels import launch_settings
from chairlift.kernels.launch_settings import DeviceLimits, HeadShape, chunk_tokens, decode_settings, prefill_settings, shared_memory

DEVICES = {
    "A100": DeviceLimits((8, 0), 166912, 108),
    "A10": DeviceLimits((8, 6), 101376, 72),
    "4090": DeviceLimits((8, 9), 101376, 128),
    "H100": DeviceLimits((9, 0), 232448, 132),
}
SHAPES = [
    HeadShape(group, *dims, *numbers)
    for group, dims, numbers in product(
        (1, 3, 4, 7, 8), ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)), ((2, 2), (2, 1), (4, 4))
    )
]


@pytest.mark.parametrize("device", DEVICES)
def test_every_head_size_up_to_256_fits_every_device(device):
    limits = DEVICES[device]
    for shape in SHAPES:
        settings = prefill_settings(shape, limits)
        assert shared_memory(shape, settings, limits.capability) <= limits.shared_memory
        # A group's heads are in one tile, and `tl.dot` needs 16 rows and keys.
        assert max(shape.group, 16) <= settings.BLOCK_M
        assert settings.BLOCK_N >= 16
        assert chunk_tokens(shape, limits) == settings.BLOCK_M // shape.group
        for tokens in (1, 4):
            settings = decode_settings(shape, tokens, limits)
            assert shared_memory(shape, settings, limits.capability) <= limits.shared_memory
            assert max(shape.group * tokens, 16) <= settings.BLOCK_M


def test_a_hopper_keeps_the_tiles_that_wgmma_needs():
    for shape in SHAPES:
        if shape.query_bytes == 2:
            settings = prefill_settings(shape, DEVICES["H100"])
            assert settings.BLOCK_M >= 64
            assert settings.num_stages == 3


def test_heads_that_fit_no_tile_are_refused_in_one_line():
    tiny = DeviceLimits((8, 9), 16384, 10)
    expected = r"attention with 256 dimensions a head in 16 bits needs \d+ KiB of shared memory, and this device has 16"
    with pytest.raises(ValueError, match=expected):
        prefill_settings(HeadShape(4, 256, 256, 2, 2), tiny)
    with pytest.raises(ValueError, match=expected):
        decode_settings(HeadShape(4, 256, 256, 2, 2), 1, tiny)


@pytest.mark.parametrize(
    ("device", "head", "cache_bytes", "rows", "older"),
    [
        ("4090", (4, 512, 512), 2, 64, 32),
        ("4090", (2, 256, 256), 1, 64, 32),
        ("4090", (2, 256, 256), 2, 64, 64),
        ("H100", (2, 256, 256), 1, 128, 128),
        ("4090", (16, 576, 512), 1, 32, 16),
        ("H100", (16, 576, 512), 1, 32, 16),
        # wgmma needs 64 rows.
        ("H100", (4, 512, 512), 1, 64, 64),
        ("A100", (16, 576, 512), 2, 32, 32),
        *((device, (4, 128, 128), 2, 128, 128) for device in DEVICES),
    ],
)
def test_prompts_with_wide_heads_have_fewer_rows_under_an_older_triton(device, head, cache_bytes, rows, older, monkeypatch):
    for spills_more, expected in ((False, rows), (True, older)):
        monkeypatch.setattr(launch_settings, "SPILLS_MORE", spills_more)
        found = prefill_settings.__wrapped__(HeadShape(*head, 2, cache_bytes), DEVICES[device])
        assert expected == found.BLOCK_M


def test_latents_in_float32_have_few_rows_and_are_read_ahead_on_a_hopper():
    assert prefill_settings(HeadShape(16, 576, 512, 4, 4), DEVICES["H100"]) == (16, 16, 8, 2)
