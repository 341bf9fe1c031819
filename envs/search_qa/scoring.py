"""How right is an answer?  Exact match and F1 as HotpotQA and SQuAD define them, and RAGEN's reward."""

from __future__ import annotations

import re
import string
from collections import Counter

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = frozenset(string.punctuation)
CLOSED = ("yes", "no", "noanswer")  # such an answer is right or wrong as a whole
LEAST_F1 = 0.3  # below it an answer is worth nothing


def normalised(answer: str) -> str:
    """Lower case, without punctuation and articles, single blanks: normalised("The  U.S.") -> "us"."""
    plain = "".join(character for character in answer.lower() if character not in PUNCTUATION)
    return " ".join(ARTICLES.sub(" ", plain).split())


def exact_match(response: str, answer: str) -> bool:
    return normalised(response) == normalised(answer)


def f1(response: str, answer: str) -> float:
    """Return the harmonic mean of precision and recall over words (arXiv 1606.05250, section 6.1)."""
    one, other = normalised(response), normalised(answer)
    if one != other and (one in CLOSED or other in CLOSED):
        return 0.0
    words, gold = one.split(), other.split()
    shared = sum((Counter(words) & Counter(gold)).values())
    return 2 * shared / (len(words) + len(gold)) if shared else 0.0


def reward(response: str, answer: str) -> float:
    """Return 1 for an exact match, else F1 where it is at least 0.3, else 0."""
    if exact_match(response, answer):
        return 1.0
    value = f1(response, answer)
    return value if value >= LEAST_F1 else 0.0
