"""What may a request to our OpenAI-compatible server ask for?  What it cannot have is refused in words (status 400)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from posttrain.config import COLDEST
from posttrain.types import UserError, one_line

if TYPE_CHECKING:
    from posttrain.models import Chat

EXTENSIONS = ("top_k", "min_p", "repetition_penalty")  # names of vLLM, which the interface of OpenAI lacks
# What transformers would ignore although the answer would be another one, and the values that ask for nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "logprobs": (None, False),  # for a completion 0 asks for those of the text itself
    "top_logprobs": (None,),
    "presence_penalty": (None, 0, 0.0),
    "response_format": (None, {"type": "text"}),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "echo": (None, False),
    "suffix": (None, ""),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "web_search_options": (None,),
    "chat_template_kwargs": (None, {}),
}
# Where transformers would fail in the middle of a stream, or not at all.
LIMITS: dict[str, tuple[type, float, float]] = {
    "temperature": (float, 0, 100),
    "top_p": (float, 1e-9, 1),
    "top_k": (int, 0, 1 << 30),
    "min_p": (float, 0, 1),
    "repetition_penalty": (float, 1e-9, 1e9),
    "frequency_penalty": (float, 0, 2),
    "max_new_tokens": (int, 1, 1 << 30),  # in a generation_config
    "max_tokens": (int, 1, 1 << 30),
    "max_completion_tokens": (int, 1, 1 << 30),
    "seed": (int, 0, (1 << 64) - 1),
}
GENERATION = ("max_new_tokens", "temperature", "top_p", *EXTENSIONS)  # of transformers' many settings
MOST_BIAS, MOST_STOPS = 100, 4  # as OpenAI's
LONGEST_STOP = 64  # characters, which are looked for after each token
MOST_MESSAGES = 2048  # as OpenAI's
LONGEST = 1024  # new tokens where a request names no limit, as in transformers


def parse_object(what: str, text: Any) -> dict[str, Any]:
    """Return the JSON object in a text; UserError for anything else, and for half a surrogate pair in it."""
    try:
        found = json.loads(text)
        json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, TypeError) as error:
        raise UserError(f"{what} cannot be read as a JSON object: {one_line(error)}.") from error
    if not isinstance(found, dict):
        raise UserError(f"{what} is not a JSON object.")
    return found


def reason_to_refuse(body: dict[str, Any]) -> str | None:
    """Return why a request cannot be answered; None where it can."""
    for key, harmless in REFUSED.items():
        if not any(type(body.get(key)) is type(one) and body.get(key) == one for one in harmless):
            return f"{key} is not supported here."
    if type(body.get("stream")) not in (bool, type(None)):
        return f"stream is {body['stream']!r:.40}, neither true nor false."
    stop = body.get("stop")
    stops = stop if isinstance(stop, list) else [] if stop is None else [stop]
    if not all(isinstance(one, str) and one for one in stops):
        return "stop is neither a text with a character in it nor a list of such texts."
    if len(stops) > MOST_STOPS:
        return f"stop holds {len(stops)} texts, more than {MOST_STOPS}."
    if (longest := max(map(len, stops), default=0)) > LONGEST_STOP:
        return f"stop holds a text of {longest} characters, more than {LONGEST_STOP}."
    body["stop"] = stops or None
    return beyond_limits(body)


def beyond_limits(given: dict[str, Any]) -> str | None:
    """Return which number is outside its limits; None where all are inside."""
    for key, (kind, low, high) in LIMITS.items():
        value = given.get(key)
        if value is not None and not (type(value) in (int, kind) and low <= value <= high):
            number = "a whole number" if kind is int else "a number"
            return f"{key} is {value!r:.40}, not {number} from {low:g} to {high:g}."
    cold = given.get("temperature")
    if cold and cold < COLDEST:
        return f"temperature is {cold}: write 0, which takes the likeliest token, or a number from {COLDEST:g} on."
    return None


def not_text(messages: Any) -> str | None:
    """Return what is not text in the messages, which transformers would leave out silently; None for text alone."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return "messages is not a list of messages."
    if len(messages) > MOST_MESSAGES:
        return f"messages holds {len(messages)} messages, more than {MOST_MESSAGES}."
    for message in messages:
        if not isinstance(message.get("role"), str):
            return f"messages holds one whose role is {message.get('role')!r:.40}, not a text."
        parts = message.get("content")
        if not isinstance(parts, str | list) or parts == []:
            return f"messages holds one whose content is {parts!r:.40}, not a text."
        for part in parts if isinstance(parts, list) else []:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text" or not isinstance(part.get("text"), str):
                return f"messages holds a part of type {kind!r:.40}: this model reads text alone."
        if message.get("tool_calls") or message.get("function_call") or message.get("audio"):
            return "messages holds calls of tools, or sound: this model reads text alone."
    return None if messages else "messages is empty."


def fit_context(body: dict[str, Any], settings: dict[str, Any], prompt: int, context: int) -> None:
    """Set the longest answer, at most the rest of the context; UserError where a request does not fit into that."""
    limits = [body.get("max_completion_tokens"), body.get("max_tokens")]
    asked = next((one for one in limits if one is not None), settings["max_new_tokens"])
    if not prompt:
        raise UserError("The prompt is empty.")
    if prompt + (asked or 1) > context:
        raise UserError(
            f"The context of this model has {context} tokens. The prompt has {prompt}, and the answer may have "
            f"{asked or 'one or more'}: shorten the prompt, or lower max_tokens."
        )
    settings["max_new_tokens"] = asked or min(LONGEST, context - prompt)


def check_size(characters: int, most: int, context: int) -> None:
    """Raise UserError where a prompt has too many characters for the context, before its tokens are counted."""
    if characters > most:
        raise UserError(
            f"The context of this model has {context} tokens. The prompt has {characters} characters, which cannot fit "
            "into them: shorten it."
        )


def generation_config(body: dict[str, Any], chat: Chat, vocabulary: int) -> dict[str, Any]:
    """Return what transformers generates with: what the request says, else OpenAI's defaults rather than the model's.

    A model's own config may sample greedily, or from the 50 likeliest tokens, whatever temperature is asked for.
    Where the request names no longest answer, `max_new_tokens` is None.
    """
    given = body.get("generation_config")
    given = {} if given is None else parse_object("generation_config", given)
    if unknown := [key for key in given if key not in GENERATION]:
        raise UserError(f"generation_config: {unknown[0]!r:.40} is not taken here, only {', '.join(GENERATION)}.")
    given = {name: body.pop(name) for name in EXTENSIONS if name in body} | given
    if problem := beyond_limits(given):
        raise UserError(f"generation_config: {problem}")
    settings: dict[str, Any] = {"max_new_tokens": None, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    settings |= {name: value for name, value in given.items() if value is not None}
    temperature = body.get("temperature")
    settings["do_sample"] = (settings["temperature"] if temperature is None else temperature) > 0
    if biases := body.pop("logit_bias", None):
        settings["sequence_bias"] = sequence_bias(biases, vocabulary)
    return settings | {"eos_token_id": chat.stop_id, "pad_token_id": chat.pad_id}


def sequence_bias(biases: Any, vocabulary: int) -> list[tuple[list[int], float]]:
    """Return OpenAI's `logit_bias` in the form of transformers.

    >>> sequence_bias({"5": -100}, 512)
    [([5], -100.0)]
    """
    if not isinstance(biases, dict):
        raise UserError('logit_bias is not an object of tokens and numbers, such as {"5": -100}.')
    found = []
    for token, bias in biases.items():
        if not (token.isascii() and token.isdecimal() and int(token[:20]) < vocabulary):
            raise UserError(f"logit_bias: {token!r:.40} is not a token of this model, an integer below {vocabulary}.")
        if type(bias) not in (int, float) or not -MOST_BIAS <= bias <= MOST_BIAS:
            raise UserError(f"logit_bias: {bias!r:.40} is not a number from -{MOST_BIAS} to {MOST_BIAS}.")
        found.append(([int(token)], float(bias)))
    return found
