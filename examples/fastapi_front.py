"""A FastAPI application in front of the server: `fastapi run examples/fastapi_front.py --port 8080`."""

from collections.abc import AsyncIterator

from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

app = FastAPI()
client = AsyncOpenAI()


class Text(BaseModel):
    text: str = Field(max_length=4000)


@app.post("/summary")
async def summary(body: Text) -> StreamingResponse:
    """Streams a summary as plain text. If the caller disconnects, the stream closes and the server frees the slot."""
    messages = [{"role": "system", "content": "Summarise the text in one sentence."}, {"role": "user", "content": body.text}]
    stream = await client.chat.completions.create(model="smollm2-135m-instruct", messages=messages, max_tokens=64, stream=True)

    async def pieces() -> AsyncIterator[str]:
        async with stream:
            async for chunk in stream:
                yield chunk.choices[0].delta.content or ""

    return StreamingResponse(pieces(), media_type="text/plain")
