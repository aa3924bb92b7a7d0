"""The requests and modes of benches/batching.py, simulated: the skewed mix shows a gap, and the even one none."""

import batching

from chairlift.sim.compare import simulate_variant


def test_every_mode_has_the_same_kv_memory_and_holds_the_longest_request():
    for mix in batching.mixes(96):
        configs = {variant.name: variant.config for variant in mix.variants()}
        assert {(config.num_kv_blocks - 1) * config.block_size for config in configs.values()} == {8 * mix.context}
        assert batching.PROMPT + max(mix.outputs) <= mix.context
        assert [name for name, config in configs.items() if config.block_size < mix.context] == ["continuous, paged"]


def test_the_skewed_mix_shows_what_each_mode_gains_and_the_even_one_no_more_than_batching():
    skewed, even = (
        {variant.name: simulate_variant(mix.workload(), variant, None, "cpu").figures()["tokens_per_s"] for variant in mix.variants()}
        for mix in batching.mixes(96)
    )
    assert skewed["no batching"] < skewed["static"] < 0.5 * skewed["continuous"] < 0.5 * skewed["continuous, paged"]
    assert even["no batching"] < 0.7 * even["static"]
    unpaged = [even[name] for name in ("static", "dynamic", "continuous")]
    assert max(unpaged) < 1.1 * min(unpaged)
    assert even["continuous, paged"] < 1.1 * min(unpaged)


class Run:
    def __init__(self, *figures):
        self.figures = lambda: figures


def test_a_line_holds_medians():
    cells = batching.lines({"static": [Run(90.0, 1.0, 2.0, 0.4, 0.8), Run(100.0, 3.0, 5.0, 0.5, 0.7), Run(300.0, 2.0, 4.0, 0.6, 0.9)]})
    assert cells[1] == ["static", "100", "2.0", "4.0", "50%", "80%"]
