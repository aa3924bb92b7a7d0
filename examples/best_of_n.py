"""Best of n with early cutting: paths with low scores are dropped while the others continue."""

from chairlift import LLM, SamplingParams


def best_of_n(llm: LLM, prompt: str, count: int, rounds: int, tokens: int) -> tuple[float, str]:
    """Samples `count` paths in rounds of `tokens` tokens and drops the worse half after each. Returns mean score and text of the best."""
    with llm.open(prompt) as root:
        start = len(root.text)
        paths = root.fork(count)
    for number in range(rounds):
        params = [SamplingParams(max_tokens=tokens, temperature=1.0, seed=100 * number + seed) for seed in range(len(paths))]
        llm.generate(paths, params)
        paths.sort(key=lambda path: path.score(mean=True), reverse=True)
        keep = max(1, len(paths) // 2)
        for path in paths[keep:]:
            path.drop()
        paths = paths[:keep]
    found = paths[0].score(mean=True), paths[0].text[start:]
    for path in paths:
        path.drop()
    return found


if __name__ == "__main__":
    with LLM() as llm:
        score, text = best_of_n(llm, "Once upon a time", count=8, rounds=3, tokens=8)
        print(f"{score:.2f} {text!r}")
