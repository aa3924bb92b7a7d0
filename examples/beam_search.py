"""Beam search on live sequences: each step computes one token for each beam."""

from chairlift import LLM, LiveSequence, SamplingParams


def beam_search(llm: LLM, prompt: str, width: int, length: int) -> list[tuple[float, list[int]]]:
    """The best `width` continuations of `length` tokens that a beam search finds: log-probability and tokens, best first."""
    likeliest = SamplingParams(max_tokens=1, temperature=0.0, logprobs=width, ignore_eos=True)
    beams: list[tuple[float, LiveSequence]] = [(0.0, llm.open(prompt))]
    start = len(beams[0][1].token_ids)
    for _ in range(length):
        outputs = llm.generate([beam for _, beam in beams], likeliest)
        candidates = [
            (score + logprob, beam, token)
            for (score, beam), output in zip(beams, outputs, strict=True)
            for token, logprob in output.logprobs[0].top
        ]
        best = sorted(candidates, key=lambda candidate: candidate[0], reverse=True)[:width]
        forks = []
        for score, beam, token in best:
            (fork,) = beam.fork()
            fork.rewind(1)
            fork.append([token])
            forks.append((score, fork))
        for _, beam in beams:
            beam.drop()
        beams = forks
    found = [(score, beam.token_ids[start:]) for score, beam in beams]
    for _, beam in beams:
        beam.drop()
    return found


if __name__ == "__main__":
    with LLM() as llm:
        for score, tokens in beam_search(llm, "The capital of France is", width=3, length=8):
            print(f"{score:.2f} {llm.tokenizer.decode(tokens)!r}")
