"""What can a request by OpenAI's interface ask for?  Anything else is refused with a message (status 400)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from posttrain.config import COLDEST
from posttrain.models.tools import tools_key
from posttrain.types import UserError, one_line

if TYPE_CHECKING:
    from posttrain.models.chat import Chat

EXTENSIONS = ("top_k", "min_p", "repetition_penalty")  # names of vLLM, not in OpenAI's interface
# Fields that transformers ignores although they change the answer, with their values that change nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "logprobs": (None, False),  # 0 asks for those of the sampled tokens in a completion
    "top_logprobs": (None,),
    "presence_penalty": (None, 0, 0.0),
    "response_format": (None, {"type": "text"}),
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
# Values outside of these limits make transformers fail in the middle of a stream, or are ignored.
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
GENERATION = ("max_new_tokens", "temperature", "top_p", *EXTENSIONS)  # the keys of a generation_config
MOST_BIAS, MOST_STOPS = 100, 4  # as OpenAI's
LONGEST_STOP = 64  # characters; searched after each token
MOST_MESSAGES = 2048  # as OpenAI's
MOST_TOOLS = 128  # as OpenAI's
LONGEST = 1024  # new tokens of a request without a limit, as in transformers


def parse_object(what: str, text: Any) -> dict[str, Any]:
    """Return the JSON object in a text; UserError for anything else, also for half a surrogate pair in it."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, TypeError) as error:
        raise UserError(f"{what} cannot be read as a JSON object: {one_line(error)}.") from error
    if not isinstance(value, dict):
        raise UserError(f"{what} is not a JSON object.")
    return value


def reason_to_refuse(body: dict[str, Any]) -> str | None:
    """Return why a request cannot be answered; None if it can."""
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


def beyond_limits(options: dict[str, Any]) -> str | None:
    """Return which number is outside its limits; None if all are inside."""
    for key, (kind, low, high) in LIMITS.items():
        value = options.get(key)
        if value is not None and not (type(value) in (int, kind) and low <= value <= high):
            number = "a whole number" if kind is int else "a number"
            return f"{key} is {value!r:.40}, not {number} from {low:g} to {high:{'d' if kind is int else 'g'}}."
    temperature = options.get("temperature")
    if temperature and temperature < COLDEST:
        return (
            f"temperature is {temperature}: write 0, which takes the likeliest token, or a number from {COLDEST:g} on."
        )
    return None


def not_text(messages: Any) -> str | None:
    """Return why the messages are not only text, which transformers would drop silently; None if they are."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return "messages is not a list of messages."
    if len(messages) > MOST_MESSAGES:
        return f"messages holds {len(messages)} messages, more than {MOST_MESSAGES}."
    for message in messages:
        if not isinstance(message.get("role"), str):
            return f"messages holds a message whose role is {message.get('role')!r:.40}, not a text."
        calls = message.get("tool_calls") if message["role"] == "assistant" else None
        empty = message.get("content") is None and message["role"] == "assistant"
        parts = "" if empty else message.get("content")
        if not isinstance(parts, str | list) or parts == []:
            return f"messages holds a message whose content is {parts!r:.40}, not a text."
        for part in parts if isinstance(parts, list) else []:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text" or not isinstance(part.get("text"), str):
                return f"messages holds a part of type {kind!r:.40}: this model reads only text."
        if message.get("function_call") or message.get("audio"):
            return "messages holds a function_call or audio: write tool_calls, or only text."
        if message.get("tool_calls") and not calls:
            return f"messages holds tool_calls of the role {message['role']!r:.40}: only the assistant calls tools."
    return None if messages else "messages is empty."


def tools_asked(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the schemas that the model is shown, and take them out of a request; UserError if they are not schemas."""
    tools: Any = body.pop("tools", None) or []
    choice = body.pop("tool_choice", None)
    if not isinstance(tools, list) or len(tools) > MOST_TOOLS:
        raise UserError(f"tools is not a list of at most {MOST_TOOLS} functions.")
    tools_key(tools)
    return [] if choice == "none" else tools


def fit_context(body: dict[str, Any], settings: dict[str, Any], prompt: int, context: int) -> None:
    """Set `max_new_tokens`, at most the rest of the context; UserError if the request does not fit."""
    limits = [body.get("max_completion_tokens"), body.get("max_tokens")]
    wanted_tokens = next((one for one in limits if one is not None), settings["max_new_tokens"])
    if not prompt:
        raise UserError("The prompt is empty.")
    if prompt + (wanted_tokens or 1) > context:
        raise UserError(
            f"The context of this model has {context} tokens. The prompt has {prompt}, and the answer may have "
            f"{wanted_tokens or 'one or more'}: shorten the prompt, or lower max_tokens."
        )
    settings["max_new_tokens"] = wanted_tokens or min(LONGEST, context - prompt)


def check_size(characters: int, most: int, context: int) -> None:
    """Raise UserError if a prompt has too many characters for the context, before it is tokenized."""
    if characters > most:
        raise UserError(
            f"The context of this model has {context} tokens. The prompt has {characters} characters, which cannot fit "
            "into them: shorten it."
        )


def generation_config(body: dict[str, Any], chat: Chat, vocabulary: int) -> dict[str, Any]:
    """Return the generation config of transformers: the request's settings, otherwise OpenAI's defaults.

    The model's own defaults may be greedy or top-k sampling, whatever the temperature of the request is. Without
    a limit in the request `max_new_tokens` is None.
    """
    raw = body.get("generation_config")
    options = {} if raw is None else parse_object("generation_config", raw)
    if unknown := [key for key in options if key not in GENERATION]:
        raise UserError(f"generation_config: {unknown[0]!r:.40} is not supported here, only {', '.join(GENERATION)}.")
    options = {name: body.pop(name) for name in EXTENSIONS if name in body} | options
    if problem := beyond_limits(options):
        raise UserError(f"generation_config: {problem}")
    settings: dict[str, Any] = {"max_new_tokens": None, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    settings |= {name: value for name, value in options.items() if value is not None}
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
    sequences = []
    for token, bias in biases.items():
        if not (token.isascii() and token.isdecimal() and int(token[:20]) < vocabulary):
            raise UserError(f"logit_bias: {token!r:.40} is not a token of this model, an integer below {vocabulary}.")
        if type(bias) not in (int, float) or not -MOST_BIAS <= bias <= MOST_BIAS:
            raise UserError(f"logit_bias: {bias!r:.40} is not a number from -{MOST_BIAS} to {MOST_BIAS}.")
        sequences.append(([int(token)], float(bias)))
    return sequences
