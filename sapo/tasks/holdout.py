"""Which questions are held out: by a salted hash of their words, so that all nodes agree without a list."""

import hashlib

from sapo.core.types import Question
from sapo.core.unicode import compatible


def normalise(text: str) -> str:
    """A question without what does not make it another question: case, compatibility forms, white space."""
    return " ".join(compatible(text).casefold().split())


def bucket(text: str, salt: str) -> float:
    """Where a question falls in [0, 1): a salted SHA-256 of its normalised text."""
    data = f"{len(salt)}:{salt}:{normalise(text)}".encode("utf-8", "surrogatepass")
    return (int.from_bytes(hashlib.sha256(data).digest()[:8], "big") >> 11) / 2**53


def is_held_out(question: Question, share: float) -> bool:
    """Whether this question is held out from training; `share` is the manifest's `held_out`."""
    return question.bucket < share
