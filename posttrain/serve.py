"""How do other programs talk to a model?  An OpenAI-compatible server: that of transformers, around one model of ours.

    python -m posttrain.serve runs/quickstart/phase3/final

Loading, chat template and checks are this project's, ConvGPT included; the prompt's tokens are those of training and
of the chat. docs/serving.md says what the server takes, what it refuses, and how vLLM serves the same folder.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import socket
import sys
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain import runlog
from posttrain.config import ModelSection, run
from posttrain.types import HUB_NAME, UserError, one_line

if TYPE_CHECKING:
    from fastapi import Request
    from transformers import PreTrainedModel

    from posttrain.chat import Chat

ROUTES = ("/v1/models", "/health")  # of transformers; those that answer are below
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
COLDEST = 1e-5  # of temperatures above 0: a smaller one divides logits until they are infinite
MOST_BIAS, MOST_STOPS = 100, 4  # as OpenAI's
LONGEST_STOP = 64  # characters: transformers compares each with the whole vocabulary before it generates
LONGEST = 1024  # new tokens where a request names no limit, as in transformers


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m posttrain.serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="MODEL", help="a phase's folder `final`, or a model of the Hub (OWNER/NAME)")
    parser.add_argument("--host", default="127.0.0.1", help="address; others reach it only if you write theirs here")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    arguments = parser.parse_args(argv)
    check(arguments.model)
    listening = listen(arguments.host, arguments.port)
    runlog.keep_private(Path("runs"))

    import uvicorn

    from envs.web import is_loopback
    from posttrain import models
    from posttrain.preflight import check_hub

    section = ModelSection(name_or_path=arguments.model, dtype=arguments.dtype)
    check_hub([section], [])
    model, chat = models.load(section, device=arguments.device, chat_template=None, training=False)
    host, port = listening.getsockname()[:2]
    app = build_app(model.eval(), chat, arguments.model, local=is_loopback(host))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    place, kind = f"[{host}]" if ":" in host else host, str(model.dtype).removeprefix("torch.")
    print(f"Serving {arguments.model} at http://{place}:{port}/v1 in {kind} on {model.device.type}", flush=True)
    server.run(sockets=[listening])


def check(model: str) -> None:
    """UserError where the packages of the server are missing, or MODEL is none; the Hub itself is not asked."""
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        raise UserError(
            "The server needs the packages fastapi, uvicorn and openai: `pip install` their three lines of "
            "requirements-extras.txt."
        )
    folder = Path(model)
    if not folder.exists() and not HUB_NAME.fullmatch(model):
        raise UserError(f"There is no folder {model}. Name the folder `final` of a phase, or a model of the Hub.")
    if folder.exists() and not (folder / "config.json").is_file():
        raise UserError(
            f"{model} holds no model: there is no config.json in it. Name the folder `final` that a phase has written."
        )


def listen(host: str, port: int) -> socket.socket:
    """A socket at this address, before any model is loaded; UserError where there can be none."""
    if not 0 <= port < 65536:  # getaddrinfo would take the remainder
        raise UserError(f"--port {port} is no port: write a number from 0, which takes a free one, to 65535.")
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(place)
        listening.listen()
    except (OSError, UnicodeError) as error:  # of a name that can be no host's
        raise UserError(
            f"Nothing can listen at {host}, port {port} ({one_line(error)}). Where another program has the port, "
            f"choose another one: --port {(port + 1) % 65536}, or --port 0 for any that is free."
        ) from error
    return listening


def build_app(model: PreTrainedModel, chat: Chat, name: str, *, local: bool = True) -> Any:
    """The application of transformers, for this model alone, under this name.

    Requests wait for each other: transformers generates for one at a time where each has sampling settings of its own.
    local: it listens where this machine alone reaches it, and no website that a browser shows may use it.
    """
    from fastapi import HTTPException
    from fastapi.responses import JSONResponse
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.serving.server import build_server
    from transformers.cli.serving.utils import GenerationState
    from transformers.utils import logging

    from envs.guard import OwnPagesOnly

    tokenizer = served_tokenizer(chat)

    class OneModel(ModelManager):
        """The model that is loaded, whatever is asked for: no request reads a file or the Hub."""

        def load_model_and_processor(self, *_: Any, **__: Any) -> Any:
            return model, tokenizer

        @staticmethod
        def process_model_name(model_id: str) -> str:
            return model_id

        @staticmethod
        def get_gen_models(cache_dir: str | None = None) -> list[dict[str, Any]]:
            return [{"id": name, "object": "model", "created": 0, "owned_by": "posttrain"}]

        def shutdown(self) -> None:
            pass

    logging.set_verbosity_error()  # it would log each request as a warning
    manager, state = OneModel(device=str(model.device), force_model=name), GenerationState()
    kinds = ("chat_handler", "completion_handler", "response_handler", "transcription_handler", "systemone_handler")
    app = build_server(manager, generation_state=state, **dict.fromkeys(kinds))  # type: ignore[arg-type]
    app.router.routes = [route for route in app.router.routes if getattr(route, "path", "") in ROUTES]
    chats, texts = handlers(model, chat, tokenizer)

    async def chat_completion(request: Request) -> Any:
        return await chats(manager, state).answer(request)

    async def completion(request: Request) -> Any:
        return await texts(manager, state).answer(request)

    async def one_model(request: Request) -> JSONResponse:
        if request.path_params["asked"] != name:
            raise HTTPException(404, f"The model here is {name}.")
        return JSONResponse(manager.get_gen_models()[0])

    app.add_route("/v1/chat/completions", chat_completion, ["POST"])
    app.add_route("/v1/completions", completion, ["POST"])
    app.add_route("/v1/models/{asked:path}", one_model)

    async def refuse(_: Any, error: Any) -> JSONResponse:
        return JSONResponse(told(error.detail, error.status_code), error.status_code)

    async def fail(_: Any, error: Exception) -> JSONResponse:
        return JSONResponse(told(one_line(error), 500), 500)

    for kind in (HTTPException, 404, 405):
        app.add_exception_handler(kind, refuse)
    app.add_exception_handler(Exception, fail)

    if local:
        app.add_middleware(OwnPagesOnly, local=True)
    return app


def handlers(model: PreTrainedModel, chat: Chat, tokenizer: Any) -> tuple[Any, Any]:
    """The classes of transformers that answer in a conversation and go on with a text: an instance for each request."""
    from fastapi import HTTPException, Response
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.cli.serving.completion import CompletionHandler
    from transformers.cli.serving.utils import Modality
    from transformers.generation.streamers import BaseStreamer

    from posttrain import compat

    text_config = model.config.get_text_config()
    context = getattr(text_config, "max_position_embeddings", None) or sys.maxsize

    class Gone(Exception):
        """The client has hung up."""

    class Watched(BaseStreamer):
        """Ends what is being generated once nobody waits for it, as transformers does where an answer is streamed."""

        unwanted = False

        def put(self, value: Any) -> None:
            if self.unwanted:
                raise Gone

        def end(self) -> None:
            pass

    class Checked:
        """What a request asks for is done or refused, with status 400."""

        streamer: Watched

        def length(self, body: dict[str, Any]) -> int:
            """Tokens of its prompt."""
            raise NotImplementedError

        async def answer(self, request: Request) -> Any:
            self.streamer = Watched()
            try:
                body = parsed("The request", await request.body())
                if problem := refusal(body):
                    raise UserError(problem)
                settings = generation_config(body, chat, text_config.vocab_size)
                fit(body, settings, self.length(body), context)
                body["generation_config"] = json.dumps(settings)
            except UserError as error:
                raise HTTPException(400, str(error)) from error
            except RecursionError as error:
                raise HTTPException(400, "The request is nested too deeply.") from error
            answer = self.handle_request(body, request.state.request_id)  # type: ignore[attr-defined]
            try:
                response = await self.while_wanted(request, answer)
            except Gone:
                return Response(status_code=499)  # nobody reads it
            if body.get("stream"):
                response.body_iterator = with_errors_told(response.body_iterator)
            return response

        async def while_wanted(self, request: Request, answer: Coroutine[Any, Any, Any]) -> Any:
            answering, leaving = asyncio.ensure_future(answer), asyncio.ensure_future(hung_up(request))
            try:
                await asyncio.wait([answering, leaving], return_when=asyncio.FIRST_COMPLETED)
            finally:
                self.streamer.unwanted = not answering.done()
                leaving.cancel()
            return await answering

    class Chats(Checked, compat.streamer_for_whole_answers(ChatCompletionHandler)):
        def length(self, body: dict[str, Any]) -> int:
            messages: Any = body.get("messages")
            if problem := not_text(messages):
                raise UserError(problem)
            # Nothing else of them: with a list of `tool_calls`, an empty one too, transformers drops the content.
            body["messages"] = [{"role": each["role"], "content": each["content"]} for each in messages]
            return len(chat.prompt(self.get_processor_inputs_from_messages(body["messages"], Modality.LLM)))

    class Texts(Checked, compat.streamer_for_whole_answers(CompletionHandler)):
        def length(self, body: dict[str, Any]) -> int:
            if not isinstance(body.get("prompt"), str):
                raise UserError("prompt must be a string.")
            return len(tokenizer(body["prompt"])["input_ids"])

    return Chats, Texts


async def hung_up(request: Request) -> None:
    """Ends when the client of a request does not wait for its answer any more."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def told(message: str, status: int) -> dict[str, Any]:
    """An error in the form that clients of OpenAI's interface show."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


async def with_errors_told(pieces: AsyncIterator[str]) -> AsyncIterator[str]:
    """A stream of transformers, whose own message of an error in the middle is no JSON where it has a quote."""
    async for piece in pieces:
        before, error, words = piece.partition('data: {"error": "')  # within JSON each quote has a backslash
        yield before + (f"data: {json.dumps(told(' '.join(words[:-4].split()), 500))}\n\n" if error else "")


def parsed(what: str, text: Any) -> dict[str, Any]:
    """The JSON object in a text; UserError where there is none, or half a surrogate pair in it."""
    try:
        found = json.loads(text)
        json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, TypeError) as error:
        raise UserError(f"{what} cannot be read as a JSON object: {one_line(error)}.") from error
    if not isinstance(found, dict):
        raise UserError(f"{what} is no JSON object.")
    return found


def refusal(body: dict[str, Any]) -> str | None:
    """Why a request cannot be answered; None where it can."""
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
    """Which number is none that it may be."""
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
    """What in the messages transformers would leave out without a word, because it is no text."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return "messages is no list of messages."
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


def fit(body: dict[str, Any], settings: dict[str, Any], prompt: int, context: int) -> None:
    """Where no limit is asked for, an answer ends with the context; UserError where a request does not fit into it."""
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


def served_tokenizer(chat: Chat) -> Any:
    """The chat's tokenizer, with prompts as everywhere else in this project: no text becomes a control token."""
    import torch
    from transformers import BatchEncoding

    tokenizer: Any = copy.copy(chat.tokenizer)

    def apply_chat_template(messages: list[dict[str, Any]], **_: Any) -> BatchEncoding:
        ids = torch.tensor([chat.prompt(messages)])
        return BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})

    tokenizer.apply_chat_template = apply_chat_template
    return tokenizer


def generation_config(body: dict[str, Any], chat: Chat, vocabulary: int) -> dict[str, Any]:
    """What transformers is to generate with, unless the request says otherwise: OpenAI's defaults, not the model's.

    A model's own config may sample greedily, or from the 50 likeliest tokens, whatever temperature is asked for.
    Where the request names no longest answer, `max_new_tokens` is None.
    """
    given = body.get("generation_config")
    given = {} if given is None else parsed("generation_config", given)
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
    """OpenAI's `logit_bias` as transformers has it.

    >>> sequence_bias({"5": -100}, 512)
    [([5], -100.0)]
    """
    if not isinstance(biases, dict):
        raise UserError('logit_bias is no object of tokens and numbers, such as {"5": -100}.')
    found = []
    for token, bias in biases.items():
        if not (token.isascii() and token.isdecimal() and int(token[:20]) < vocabulary):
            raise UserError(f"logit_bias: {token!r:.40} is no token of this model, a whole number below {vocabulary}.")
        if type(bias) not in (int, float) or not -MOST_BIAS <= bias <= MOST_BIAS:
            raise UserError(f"logit_bias: {bias!r:.40} is no number from -{MOST_BIAS} to {MOST_BIAS}.")
        found.append(([int(token)], float(bias)))
    return found


if __name__ == "__main__":
    run(main)
