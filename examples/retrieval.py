"""A retrieval loop: the model writes a search, the program appends the result, and the model continues."""

from chairlift import LLM, SamplingParams

FACTS = {"lift": "The lift has 40 chairs.", "summit": "The summit is at 2,100 metres."}
INTRODUCTION = """\
To look a word up, write it between [ and ].
Question: How deep is the lake?
Search: [lake]
Found: The lake is 12 metres deep.
Answer: 12 metres
"""


def answer(llm: LLM, question: str) -> str:
    """Answers with at most two searches in `FACTS`. Only new tokens are computed after each."""
    with llm.open(f"{INTRODUCTION}Question: {question}") as sequence:
        for _ in range(2):
            sequence.append("\nSearch: [")
            search = sequence.generate(SamplingParams(max_tokens=4, temperature=0.0, stop=("]",)))  # the sequence keeps the "]"
            fact = next((fact for name, fact in FACTS.items() if name in search.text.lower()), "Nothing was found.")
            sequence.append(f"\nFound: {fact}")
        sequence.append("\nAnswer:")
        return sequence.generate(SamplingParams(max_tokens=16, temperature=0.0, stop=("\n",))).text.strip()


if __name__ == "__main__":
    with LLM() as llm:
        print(answer(llm, "How many chairs has the lift?"))
