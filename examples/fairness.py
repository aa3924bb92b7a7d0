"""Shows that one tenant's burst does not delay another tenant. Start the server with `--scheduling-policy fair`."""

import asyncio
import time

from openai import AsyncOpenAI


async def main() -> None:
    client = AsyncOpenAI()
    begin = time.monotonic()

    async def ask(tenant: str) -> tuple[float, str]:
        await client.completions.create(
            model="smollm2-135m-instruct", prompt="Once upon a time", max_tokens=16, extra_headers={"X-Tenant-Id": tenant}
        )
        return time.monotonic() - begin, tenant

    burst = [asyncio.create_task(ask("alice")) for _ in range(24)]
    await asyncio.sleep(0.2)  # alice's requests are running and waiting
    one = asyncio.create_task(ask("bob"))
    answers = sorted(await asyncio.gather(*burst, one))
    place = [tenant for _, tenant in answers].index("bob") + 1
    print(f"bob's request came last and was answered as number {place} of {len(answers)}")


asyncio.run(main())
