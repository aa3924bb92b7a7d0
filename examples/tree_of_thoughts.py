"""A tree of thoughts: each kept thought is forked into several next ones, and only the best of a level are kept."""

from chairlift import LLM, LiveSequence, SamplingParams


def tree_of_thoughts(llm: LLM, prompt: str, depth: int, branches: int, keep: int, tokens: int) -> list[list[int]]:
    """Tokens of the `keep` best paths of `depth` thoughts, best first. A thought has at most `tokens` tokens."""
    level: list[LiveSequence] = [llm.open(prompt)]
    for number in range(depth):
        for path in level:
            path.append(f"\nStep {number + 1}:")
        thoughts = [fork for path in level for fork in path.fork(branches)]
        for path in level:
            path.drop()
        params = [SamplingParams(max_tokens=tokens, stop=("\n",), temperature=0.8, seed=seed) for seed in range(len(thoughts))]
        llm.generate(thoughts, params)
        thoughts.sort(key=lambda thought: thought.score(mean=True), reverse=True)
        for thought in thoughts[keep:]:
            thought.drop()
        level = thoughts[:keep]
    found = [path.token_ids for path in level]
    for path in level:
        path.drop()
    return found


if __name__ == "__main__":
    with LLM() as llm:
        question = "Question: Anna has 3 apples and buys 4 more. How many has she?\nLet us think in short steps."
        print(llm.tokenizer.decode(tree_of_thoughts(llm, question, depth=2, branches=3, keep=2, tokens=16)[0]))
