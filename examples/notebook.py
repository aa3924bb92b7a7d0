"""The model in this process, in cells for a notebook or an editor that knows `# %%`. No server is needed."""

# %% Load the default model once.
from chairlift import LLM, SamplingParams

llm = LLM()

# %% Complete prompts in one batch.
for output in llm.generate(["The capital of France is", "2 + 2 ="], SamplingParams(max_tokens=8, temperature=0)):
    print(repr(output.text))

# %% Chat.
messages = [{"role": "user", "content": "Name three colours."}]
[output] = llm.chat(messages, SamplingParams(max_tokens=32))
print(output.text)

# %% Stream an answer.
for piece in llm.stream_chat(messages, SamplingParams(max_tokens=32)):
    print(piece.text, end="", flush=True)
print()

# %% Free the memory.
llm.close()
