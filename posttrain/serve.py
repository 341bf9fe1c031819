"""How do other programs talk to a model?  An OpenAI-compatible server: that of transformers, around one model of ours.

    python -m posttrain.serve runs/quickstart/phase3/final

Loading, chat template and checks are this project's, ConvGPT included; the prompt's tokens are those of training and
of the chat. docs/serving.md says what the server takes, what it refuses, and how vLLM serves the same folder.
"""

from __future__ import annotations

import argparse
import copy
import json
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain import runlog
from posttrain.config import ModelSection, run
from posttrain.types import UserError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from posttrain.chat import Chat

ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/health")
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
}
LIMITS = {  # where transformers would fail in the middle of a stream, or not at all
    "temperature": (0, 100),
    "top_p": (1e-9, 1),
    "top_k": (0, 1 << 30),
    "min_p": (0, 1),
    "repetition_penalty": (1e-9, 1e9),
    "frequency_penalty": (0, 2),
    "max_new_tokens": (1, 1 << 30),  # in a generation_config
    "max_tokens": (1, 1 << 30),
    "max_completion_tokens": (1, 1 << 30),
    "seed": (0, (1 << 64) - 1),
}
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

    from posttrain import models
    from posttrain.preflight import check_hub

    section = ModelSection(name_or_path=arguments.model, dtype=arguments.dtype)
    check_hub([section], [])
    model, chat = models.load(section, device=arguments.device, chat_template=None, training=False)
    server = uvicorn.Server(uvicorn.Config(build_app(model.eval(), chat, arguments.model), log_level="warning"))
    host, port = listening.getsockname()[:2]
    print(f"Serving {arguments.model} at http://{f'[{host}]' if ':' in host else host}:{port}/v1", flush=True)
    server.run(sockets=[listening])


def check(model: str) -> None:
    """UserError where the packages of the server are missing, or MODEL is none; the Hub itself is not asked."""
    from transformers.utils.import_utils import is_serve_available

    from posttrain.model_files import HUB_NAME

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
    except OSError as error:
        raise UserError(
            f"Nothing can listen at {host}, port {port} ({one_line(error)}). Where another program has the port, "
            "choose another one: --port 8001, or --port 0 for any that is free."
        ) from error
    return listening


def build_app(model: PreTrainedModel, chat: Chat, name: str) -> Any:
    """The application of transformers, for this model alone, under this name.

    Requests wait for each other: transformers generates for one at a time where each has sampling settings of its own.
    """
    from fastapi import HTTPException
    from fastapi.responses import JSONResponse
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.cli.serving.completion import CompletionHandler
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.serving.server import build_server
    from transformers.cli.serving.utils import GenerationState, Modality
    from transformers.utils import logging

    tokenizer = served_tokenizer(chat)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize

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

    class Checked:
        """What a request asks for is done or refused, with status 400."""

        def length(self, body: dict[str, Any]) -> int:
            """Tokens of its prompt."""
            raise NotImplementedError

        async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
            try:
                if problem := refusal(body):
                    raise UserError(problem)
                settings = generation_config(body, chat)
                fit(body, settings, self.length(body), context)
                body["generation_config"] = json.dumps(settings)
                return await super().handle_request(body, request_id)  # type: ignore[misc]
            except UserError as error:
                raise HTTPException(400, str(error)) from error
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                raise HTTPException(400, one_line(error)) from error

    class Chats(Checked, ChatCompletionHandler):
        def length(self, body: dict[str, Any]) -> int:
            return len(chat.prompt(self.get_processor_inputs_from_messages(body["messages"], Modality.LLM)))

    class Texts(Checked, CompletionHandler):
        def length(self, body: dict[str, Any]) -> int:
            if not isinstance(body.get("prompt"), str):
                raise UserError("prompt must be a string.")
            return len(tokenizer(body["prompt"])["input_ids"])

    logging.set_verbosity_error()  # it would log each request as a warning
    manager, state = OneModel(device=str(model.device), force_model=name), GenerationState()
    handlers: dict[str, Any] = {
        "chat_handler": Chats(manager, state),
        "completion_handler": Texts(manager, state),
        "response_handler": None,
        "transcription_handler": None,
        "systemone_handler": None,
    }
    app = build_server(manager, generation_state=state, **handlers)

    @app.exception_handler(HTTPException)
    async def refuse(_: Any, error: HTTPException) -> JSONResponse:  # in the form that clients show
        return JSONResponse({"error": {"message": error.detail, "code": error.status_code}}, error.status_code)

    app.router.routes = [route for route in app.router.routes if getattr(route, "path", "") in ROUTES]
    return app


def refusal(body: dict[str, Any]) -> str | None:
    """Why a request cannot be answered; None where it can."""
    for key, harmless in REFUSED.items():
        if not any(type(body.get(key)) is type(one) and body.get(key) == one for one in harmless):
            return f"{key} is not supported here."
    stop = body.get("stop")
    if stop is not None and not all(
        isinstance(one, str) and one for one in (stop if isinstance(stop, list) else [stop])
    ):
        return "stop is neither a text with a character in it nor a list of such texts."
    body["stop"] = stop or None
    return beyond_limits(body) or ("messages" in body and not_text(body["messages"])) or None


def beyond_limits(given: dict[str, Any]) -> str | None:
    """Which number is none that it may be."""
    for key, (low, high) in LIMITS.items():
        value = given.get(key)
        if value is not None and not (type(value) in (int, float) and low <= value <= high):
            return f"{key} is {value!r:.40}, not a number from {low:g} to {high:g}."
    return None


def not_text(messages: Any) -> str | None:
    """What in the messages transformers would leave out without a word, because it is no text."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return "messages is no list of messages."
    for message in messages:
        parts = message.get("content")
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


def generation_config(body: dict[str, Any], chat: Chat) -> dict[str, Any]:
    """What transformers is to generate with, unless the request says otherwise: OpenAI's defaults, not the model's.

    A model's own config may sample greedily, or from the 50 likeliest tokens, whatever temperature is asked for.
    Where the request names no longest answer, `max_new_tokens` is None.
    """
    given = json.loads(body.get("generation_config") or "{}")
    if not isinstance(given, dict):
        raise UserError("generation_config is no JSON object.")
    settings = {"max_new_tokens": None, "do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    settings |= {name: body.pop(name) for name in EXTENSIONS if name in body} | given
    if problem := beyond_limits(settings):
        raise UserError(f"generation_config: {problem}")
    return settings | {"eos_token_id": chat.stop_id, "pad_token_id": chat.pad_id}


if __name__ == "__main__":
    run(main)
