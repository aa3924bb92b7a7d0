"""Uses the server as a LangChain chat model, in a chain with a prompt."""

from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

model = ChatOpenAI(model="smollm2-135m-instruct", max_tokens=32, temperature=0)
prompt = ChatPromptTemplate.from_messages([("system", "Answer in one sentence."), ("user", "What is the capital of {country}?")])
chain = prompt | model

for answer in chain.batch([{"country": "France"}, {"country": "Italy"}]):
    print(answer.text)
for chunk in chain.stream({"country": "Spain"}):
    print(chunk.text, end="", flush=True)
print()
