"""Lets the model call a function, and gives it the result."""

import json

from openai import OpenAI


def get_weather(city: str) -> str:
    return f"It is sunny in {city}."


parameters = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"], "additionalProperties": False}
tools = [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}]
messages = [{"role": "user", "content": "What is the weather in Paris?"}]

client = OpenAI()
model = "smollm2-135m-instruct"
answer = client.chat.completions.create(
    model=model, messages=messages, tools=tools, tool_choice="required", parallel_tool_calls=False, temperature=0
)
message = answer.choices[0].message
messages.append(message)
for call in message.tool_calls:
    result = get_weather(**json.loads(call.function.arguments))
    print(f"{call.function.name}({call.function.arguments}) = {result}")
    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

answer = client.chat.completions.create(model=model, messages=messages, max_tokens=40, temperature=0)
print(answer.choices[0].message.content)
