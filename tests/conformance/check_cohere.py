"""Cohere's client: documents ordered by both versions of its API, and typed errors."""

import asyncio

import cohere
import pytest

QUERY = "How do skiers get up?"
DOCUMENTS = ["Bread needs yeast.", "A chairlift carries skiers."]


@pytest.mark.parametrize("version", [cohere.Client, cohere.ClientV2])
def test_documents_are_ordered(real, key, model, version):
    client = version(api_key=key, base_url=real)
    results = client.rerank(model=model, query=QUERY, documents=DOCUMENTS).results
    assert [result.index for result in results] == [1, 0]
    assert 1 >= results[0].relevance_score > results[1].relevance_score >= -1
    [best] = client.rerank(model=model, query=QUERY, documents=DOCUMENTS, top_n=1).results
    assert best == results[0]


def test_several_requests_at_once(real, key, model):
    async def run():
        async with cohere.AsyncClientV2(api_key=key, base_url=real) as client:
            return await asyncio.gather(*(client.rerank(model=model, query=QUERY, documents=DOCUMENTS) for _ in range(8)))

    answers = asyncio.run(run())
    assert len({answer.id for answer in answers}) == 8
    assert all(answer.results == answers[0].results for answer in answers)


def test_errors_are_typed(real, key, model):
    with pytest.raises(cohere.UnauthorizedError):
        cohere.ClientV2(api_key="wrong", base_url=real).rerank(model=model, query=QUERY, documents=DOCUMENTS)
    client = cohere.ClientV2(api_key=key, base_url=real)
    with pytest.raises(cohere.NotFoundError, match="does not exist"):
        client.rerank(model="other", query=QUERY, documents=DOCUMENTS)
    with pytest.raises(cohere.BadRequestError, match="documents must be a list"):
        client.rerank(model=model, query=QUERY, documents=[])
