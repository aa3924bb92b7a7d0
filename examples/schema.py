"""Gets an answer that is an instance of a class: the server allows only tokens that fit the class's JSON schema."""

from typing import Literal

from openai import OpenAI
from pydantic import BaseModel, Field


class Animal(BaseModel):
    name: Literal["cat", "dog", "spider"]
    legs: int = Field(ge=0, le=8)


answer = OpenAI().chat.completions.parse(
    model="smollm2-135m-instruct",
    messages=[{"role": "user", "content": "Which animal has eight legs? Answer in JSON."}],
    response_format=Animal,
    temperature=0,
)
animal = answer.choices[0].message.parsed
print(f"{animal.name}: {animal.legs} legs")
