"""Texts that are longer than a step are computed in parts, beside shorter ones."""

from pathlib import Path

import numpy as np
import tiny_encoders

from chairlift.config import EngineConfig
from chairlift.engine.engine import Engine
from chairlift.engine.engine_request import EngineRequest
from chairlift.runner.long_texts import MAX_LONG_TEXTS, LongTexts
from chairlift.sampling import EMBED
from chairlift.scheduling import Scheduling

IDS, TYPES = np.arange(4, 44, dtype=np.int32), np.zeros(0, dtype=np.int32)
STEP = 8


class RecordingBlocks:
    """An encoder that keeps the numbers of blocks that texts have reached."""

    blocks = 10

    def __init__(self) -> None:
        self.reached: list[int] = []

    def advance(self, text: object, blocks: int) -> None:
        self.reached.append(blocks)

    def finish(self, text: object, out: np.ndarray) -> None:
        self.reached.append(self.blocks)
        out[:] = 1


def test_a_step_computes_a_part_of_the_blocks_of_a_long_text() -> None:
    encoder, out = RecordingBlocks(), np.zeros((1, 3), dtype=np.float32)
    texts = LongTexts(encoder, STEP)
    for computed in (3, 8, 22, 39):
        texts.advance(5, IDS, TYPES, computed)
    assert encoder.reached == [2, 5, 9]
    assert texts.finish(5, out)
    assert encoder.reached == [2, 5, 9, 10]
    assert out.all()
    assert not texts.finish(5, out)
    texts.advance(5, IDS[:STEP], TYPES, 7)
    assert not texts.finish(5, out)


def test_the_number_of_long_texts_is_bounded() -> None:
    texts = LongTexts(RecordingBlocks(), STEP)
    for slot in range(MAX_LONG_TEXTS + 2):
        texts.advance(slot, IDS, TYPES, STEP)
    assert len(texts) == MAX_LONG_TEXTS
    texts.forget(0)
    texts.advance(MAX_LONG_TEXTS, IDS, TYPES, 2 * STEP)
    assert len(texts) == MAX_LONG_TEXTS
    assert texts.finish(MAX_LONG_TEXTS, np.zeros((1, 3), dtype=np.float32))


def test_a_short_text_does_not_wait_for_a_long_one(tmp_path: Path) -> None:
    tiny_encoders.write("Bert", tmp_path)
    engine = Engine(EngineConfig(model=str(tmp_path), threads=2, max_num_seqs=STEP, max_num_batched_tokens=STEP))
    states = MAX_LONG_TEXTS * (engine.info.max_text_len or 0) * engine.runner.model_config.hidden_size * 4
    assert engine.info.num_bytes == engine.info.checkpoint.weight_bytes + states > states > 0

    def step() -> dict[int, bytes]:
        outputs = engine.step()
        return {} if outputs is None else dict(outputs.details)

    def add(tag: int, text: list[int]) -> None:
        engine.add(EngineRequest.of(tag, text, EMBED, Scheduling()))

    def embed(tag: int, text: list[int]) -> bytes:
        add(tag, text)
        while tag not in (found := step()):
            pass
        return found[tag]

    short = embed(1, [5, 6, 7])
    longs = {tag: (IDS + tag).tolist() for tag in (2, 4, 6)}
    for tag, text in longs.items():
        add(tag, text)
        assert not step()
        assert not step()
        add(tag + 1, [5, 6, 7])
        assert step() == {tag + 1: short}
        if tag == 2:
            # Its slot's next text begins anew.
            engine.abort(tag)
            assert not len(engine.runner._long)  # type: ignore[attr-defined]  # noqa: SLF001
    found: dict[int, bytes] = {}
    while len(found) < 2:
        found |= step()
    assert found == {tag: embed(10 + tag, longs[tag]) for tag in (4, 6)}
    engine.close()
