"""Fields of other servers that this one knows, has no use for, and accepts where they change nothing.

OpenAI's clients and vLLM's send them at their defaults. A value that would ask for something is refused by name: a
field that is silently ignored is an answer to another question.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ANYTHING = object()  # labels for the operator of the server; no answer depends on them

LABELS = {
    "user": ANYTHING,
    "metadata": ANYTHING,
    "safety_identifier": ANYTHING,
    "prompt_cache_key": ANYTHING,
    "request_id": ANYTHING,
}
VLLM = {
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "spaces_between_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logits_processors": ([],),
    "priority": (0,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "kv_transfer_params": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
}
COMPLETION = {**LABELS, **VLLM, "suffix": ("",)}
CHAT = {
    **LABELS,
    **VLLM,
    "best_of": (1,),
    "echo": (False,),
    "audio": (),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_cache_retention": ("in_memory", "24h"),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "documents": ([],),
    "chat_template": (),
}


def without_accepted(body: Mapping[str, Any], accepted: Mapping[str, Any]) -> dict[str, Any]:
    """`body` less the accepted fields. Raises ValueError for one whose value asks for something."""
    kept: dict[str, Any] = {}
    for name, value in body.items():
        if name not in accepted:
            kept[name] = value
        elif accepted[name] is not ANYTHING and value is not None and value not in accepted[name]:
            choices = " or ".join(repr(choice) for choice in accepted[name]) or "null"
            raise ValueError(f"{name} is not supported; leave it out, or send {choices}")
    return kept
