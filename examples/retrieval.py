"""A retrieval loop: the model writes a search, the program appends what it finds, and the model goes on."""

from chairlift import LLM, SamplingParams

FACTS = {"lift": "The lift has 40 chairs.", "summit": "The summit is at 2,100 metres."}


def answer(llm: LLM, question: str) -> str:
    """Answers with at most two searches in `FACTS`. Only new tokens are computed after each."""
    prompt = f"Question: {question}\nTo look a word up, write it between [ and ].\nSearch: ["
    with llm.open(prompt) as sequence:
        for _ in range(2):
            word = sequence.generate(SamplingParams(max_tokens=4, temperature=0.0, stop=("]", "\n"))).text.strip().lower()
            fact = next((fact for name, fact in FACTS.items() if name in word or name in question), "Nothing was found.")
            sequence.append(f"]\nFound: {fact}\nSearch: [")
        sequence.append("]\nAnswer:")
        return sequence.generate(SamplingParams(max_tokens=16, temperature=0.0, stop=("\n",))).text.strip()


if __name__ == "__main__":
    with LLM() as llm:
        print(answer(llm, "How many chairs has the lift?"))
