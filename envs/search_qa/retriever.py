"""How does a search server get a query?  By a POST with a deadline: it returns a list of articles or a clear error."""

from __future__ import annotations

from envs.search_qa.library import Article
from envs.web import FAILURES, LONGEST_WAIT, NoAnswer, is_address, post_json


class RetrieverError(NoAnswer):
    """The server did not answer, or not as it should."""


class Retriever:
    """Asks `url` with {"query": ..., "k": ...}; it answers {"results": [{"title": ..., "text": ...}, ...]}."""

    def __init__(self, url: str, timeout: float) -> None:
        if not is_address(url) or not 0 < timeout <= LONGEST_WAIT:
            raise ValueError(
                f"search_qa: retriever={url} with timeout={timeout:g} cannot be asked. Write an address such as "
                f"http://localhost:8000/search, and seconds above 0 and at most {LONGEST_WAIT:g}."
            )
        self.url, self.timeout = url, timeout

    def search(self, query: str, k: int) -> list[Article]:
        """Return the first `k` results; RetrieverError, one paragraph, where it gives none."""
        try:
            reply = post_json(self.url, {"query": query, "k": k}, self.timeout)
            results = [(result["title"], result["text"]) for result in reply["results"][:k]]
            if not all(isinstance(part, str) for result in results for part in result):
                raise TypeError("a title or text is not a string")
            return results
        except (*FAILURES, LookupError, TypeError) as error:
            raise RetrieverError(
                f"search_qa: the retriever {self.url} gave no results ({type(error).__name__}: {str(error)[:200]}). It "
                'must answer POST {"query", "k"} with {"results": [{"title", "text"}, ...]} within '
                f"{self.timeout:g} s; without the option `retriever` articles are searched by BM25."
            ) from error
