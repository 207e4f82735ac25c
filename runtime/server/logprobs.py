"""Log-probabilities in the three forms that clients read: completions', chats', and vLLM's for prompts.

The chosen token stands among the likeliest with the very same number: lm-eval compares the two for equality.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from compress.runtime.request import TokenLogprobs
from compress.runtime.server.sampling import finite
from compress.runtime.text import Pieces

Scored = Sequence[tuple[int, TokenLogprobs | None]]  # a token and what the model gave it; None for the first of all


def token_string(pieces: Pieces | None, token: int) -> str:
    return f"token_id:{token}" if pieces is None else pieces.token_text(token)


def completion_logprobs(scored: Scored, pieces: Pieces | None, count: int, offsets: list[int]) -> dict[str, list[Any]]:
    """`count` likeliest of each token beside itself; `offsets` say where in the text each token begins."""
    told: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": offsets}
    for token, given in scored:
        told["tokens"].append(token_string(pieces, token))
        told["token_logprobs"].append(None if given is None else finite(given.chosen))
        told["top_logprobs"].append(None if given is None else _by_string(token, given, pieces, count))
    return told


def _by_string(token: int, given: TokenLogprobs, pieces: Pieces | None, count: int) -> dict[str, float]:
    top: dict[str, float] = {}
    for other, logprob in [(token, given.chosen), *list(given.top.items())[:count]]:
        if other == token and top:
            continue
        text = token_string(pieces, other)
        # two tokens of one spelling (an added token and a plain one): both are told
        top[f"token_id:{other}" if text in top else text] = finite(logprob)
    return top


def chat_logprobs(scored: Scored, pieces: Pieces | None, count: int) -> dict[str, Any]:
    content = []
    for token, given in scored:
        assert given is not None, "a prompt has no part in a chat's logprobs"
        top = [_entry(other, logprob, pieces) for other, logprob in list(given.top.items())[:count]]
        content.append(_entry(token, given.chosen, pieces) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def _entry(token: int, logprob: float, pieces: Pieces | None) -> dict[str, Any]:
    raw = None if pieces is None else list(pieces.token_bytes(token))
    return {"token": token_string(pieces, token), "logprob": finite(logprob), "bytes": raw}


def prompt_logprobs(scored: Scored, pieces: Pieces | None, count: int) -> list[dict[str, Any] | None]:
    """vLLM's: for each token of the prompt {id: {logprob, rank, decoded_token}}, the first null.

    The rank of a token that is not among the `count` likeliest is not known: null.
    """
    told: list[dict[str, Any] | None] = []
    for token, given in scored:
        if given is None:
            told.append(None)
            continue
        ranked = {other: (rank, logprob) for rank, (other, logprob) in enumerate(list(given.top.items())[:count], 1)}
        listed = {token: ranked.get(token, (None, given.chosen)), **ranked}
        told.append(
            {
                str(other): {"logprob": finite(logprob), "rank": rank, "decoded_token": token_string(pieces, other)}
                for other, (rank, logprob) in listed.items()
            }
        )
    return told
