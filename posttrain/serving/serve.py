"""How do other programs use a model?  An OpenAI-compatible server: that of transformers, for one model.

    posttrain serve runs/quickstart/phase3/final

Loading, chat template and checks are this project's, ConvGPT included; the prompt's tokens are those of training and
of the chat. docs/serving.md says what the server takes, what it refuses, and how vLLM serves the same folder.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import re
import socket
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envs.guard import hung_up, openai_error
from posttrain.config import ModelSection, run
from posttrain.models import check_size, fit_context, generation_config, not_text, parse_object, reason_to_refuse
from posttrain.runtime import runlog
from posttrain.serving.generation import context_of
from posttrain.types import HUB_NAME, UserError, one_line

if TYPE_CHECKING:
    from fastapi import Request
    from transformers import PreTrainedModel

    from posttrain.models import Chat

ROUTES = ("/v1/models", "/health")  # of transformers; those that answer are below
KEY = "SERVE_API_KEY"  # an environment variable: every user of a machine can read a command line
# Bytes of a request: for each token of the context (any script, escaped or not); at least, at most.
TOKEN_BYTES, LEAST_BYTES, MOST_BYTES = 16, 1 << 20, 8 << 20
MOST_CONNECTIONS = 512  # at the same time, waiting requests included


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="posttrain serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="MODEL", help="a phase's folder `final`, or a model of the Hub (OWNER/NAME)")
    parser.add_argument("--host", default="127.0.0.1", help=f"address; one that other machines reach needs {KEY}")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    arguments = parser.parse_args(argv)
    check_model_argument(arguments.model)
    listening = listen(arguments.host, arguments.port)
    host, port = listening.getsockname()[:2]
    key = chosen_key(arguments.host, host)
    runlog.keep_private(Path("runs"))

    import uvicorn

    from envs.guard import patient_protocol
    from envs.web import is_loopback
    from posttrain import models
    from posttrain.plan import check_hub

    section = ModelSection(name_or_path=arguments.model, dtype=arguments.dtype)
    check_hub([section], [])
    model, chat = models.load(section, device=arguments.device, chat_template=None, training=False)
    app = build_server_app(model.eval(), chat, arguments.model, local=is_loopback(host), key=key)
    config = uvicorn.Config(app, log_level="warning", http=patient_protocol(), limit_concurrency=MOST_CONNECTIONS)
    server = uvicorn.Server(config)
    place, kind = f"[{host}]" if ":" in host else host, str(model.dtype).removeprefix("torch.")
    gc.freeze()  # otherwise the garbage collector walks through all of torch while a large request is read
    print(f"Serving {arguments.model} at http://{place}:{port}/v1 in {kind} on {model.device.type}", flush=True)
    server.run(sockets=[listening])


def check_model_argument(model: str) -> None:
    """Raise UserError if packages are missing or MODEL cannot be a model."""
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        raise UserError(
            "The server needs the packages fastapi and uvicorn: `pip install '.[serve]'` in this project's folder."
        )
    folder = Path(model)
    if not folder.exists() and not HUB_NAME.fullmatch(model):
        raise UserError(f"There is no folder {model}. Name the folder `final` of a phase, or a model of the Hub.")
    if folder.exists() and not (folder / "config.json").is_file():
        raise UserError(
            f"{model} is not a model: there is no config.json in it. Name the folder `final` that a phase has written."
        )


def chosen_key(option: str, host: str) -> str | None:
    """Return the API key of the clients; UserError if other machines reach the server without a key."""
    from envs.web import is_loopback

    key = os.environ.get(KEY)
    if key is not None and not re.fullmatch("[!-~]+", key):
        raise UserError(f"The environment variable {KEY} is empty, or holds characters that a key cannot have.")
    if key is None and not is_loopback(host):
        raise UserError(
            f"--host {option} lets others reach this server: set the environment variable {KEY} to a secret word, which"
            " clients send as their API key."
        )
    return key


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at this address, before a model is loaded.

    Raises:
        UserError: the address is in use or not allowed.
    """
    if not 0 <= port < 65536:  # getaddrinfo would take the remainder
        raise UserError(f"--port {port} is not a port: write a number from 0, which takes a free one, to 65535.")
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(place)
        listening.listen()
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that no host can have
        raise UserError(
            f"Nothing can listen at {host}, port {port} ({one_line(error)}). If another program uses the port, "
            f"choose another one: --port {(port + 1) % 65536}, or --port 0 for any free one."
        ) from error
    return listening


def build_server_app(
    model: PreTrainedModel, chat: Chat, name: str, *, local: bool = True, key: str | None = None
) -> Any:
    """Build the application of transformers for this model alone, under this name.

    Requests are answered one at a time, since each has its own sampling settings.

    Args:
        local: whether only this machine reaches the server.
        key: the API key of the clients.
    """
    from fastapi import HTTPException
    from fastapi.responses import JSONResponse
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.serving.server import build_server
    from transformers.utils import logging

    from envs.guard import KeyHolders, OwnPagesOnly, WholeRequests
    from posttrain.serving.served_answers import OneByOne

    class OneModel(ModelManager):
        """The manager of the loaded model alone: no request reads a file or the Hub."""

        def load_model_and_processor(self, *_: Any, **__: Any) -> Any:
            return model, chat.tokenizer

        @staticmethod
        def process_model_name(model_id: str) -> str:
            return model_id

        @staticmethod
        def get_gen_models(cache_dir: str | None = None) -> list[dict[str, Any]]:
            return [{"id": name, "object": "model", "created": 0, "owned_by": "posttrain"}]

        def shutdown(self) -> None:
            pass

    logging.set_verbosity_error()  # otherwise each request is logged as a warning
    manager, state = OneModel(device=str(model.device), force_model=name), OneByOne()
    kinds = ("chat_handler", "completion_handler", "response_handler", "transcription_handler", "systemone_handler")
    app = build_server(manager, generation_state=state, **dict.fromkeys(kinds))  # type: ignore[arg-type]
    app.router.routes = [route for route in app.router.routes if getattr(route, "path", "") in ROUTES]
    chats, texts = handlers(model, chat)

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
        return JSONResponse(openai_error(error.detail, error.status_code), error.status_code)

    async def fail(_: Any, error: Exception) -> JSONResponse:
        return JSONResponse(openai_error(one_line(error), 500), 500)

    for kind in (HTTPException, 404, 405):
        app.add_exception_handler(kind, refuse)
    app.add_exception_handler(Exception, fail)

    most = min(MOST_BYTES, max(LEAST_BYTES, TOKEN_BYTES * context_of(model)))
    # the middleware that is added last sees a request first
    app.add_middleware(WholeRequests, most=lambda _: most, form=openai_error)
    if key is not None:
        app.add_middleware(KeyHolders, key=key, form=openai_error)
    app.add_middleware(OwnPagesOnly, local=local, form=openai_error)
    return app


def handlers(model: PreTrainedModel, chat: Chat) -> tuple[Any, Any]:
    """Return transformers' handlers of chats and of completions: classes with an instance for each request."""
    from fastapi import HTTPException, Response
    from fastapi.responses import JSONResponse
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.cli.serving.completion import CompletionHandler
    from transformers.cli.serving.utils import Modality

    from posttrain.models import tools_asked
    from posttrain.runtime import compat
    from posttrain.serving.served_answers import reader_of
    from posttrain.serving.served_calls import CallReader, characters_of, whole_messages

    vocabulary, context = model.config.get_text_config().vocab_size, context_of(model)
    characters = context * max(map(len, chat.tokenizer.get_vocab()))
    reader = reader_of(chat.tokenizer)
    reading = ThreadPoolExecutor(1, "reading")  # not in the event loop: the longest prompts take a second

    class Checked:
        """A handler that refuses with status 400 what it cannot do."""

        calls: CallReader | None = None  # of a request with tools

        def prompt(self, body: dict[str, Any]) -> list[int]:
            """Return the ids of the prompt; UserError without one."""
            raise NotImplementedError

        def read(self, raw: bytes) -> dict[str, Any]:
            """Return the settings of a request; UserError if it cannot be answered."""
            try:
                body = parse_object("The request", raw)
                if problem := reason_to_refuse(body):
                    raise UserError(problem)
                settings = generation_config(body, chat, vocabulary)
                ids = self.prompt(body)
                fit_context(body, settings, len(ids), context)
            except RecursionError as error:
                raise UserError("The request is nested too deeply.") from error
            body["generation_config"] = json.dumps(settings)
            self.tokenizer = reader(ids)
            self.tokenizer.calls = self.calls
            return body

        async def answer(self, request: Request) -> Any:
            raw = await request.body()
            try:
                body = await asyncio.get_running_loop().run_in_executor(reading, self.read, raw)
            except UserError as error:
                raise HTTPException(400, str(error)) from error
            answering = asyncio.ensure_future(self.handle_request(body, request.state.request_id))  # type: ignore[attr-defined]
            leaving = asyncio.ensure_future(hung_up(request))
            try:
                await asyncio.wait([answering, leaving], return_when=asyncio.FIRST_COMPLETED)
                if not answering.done():
                    return Response(status_code=499)  # nobody reads it
                response = await answering
            finally:
                answering.cancel()
                leaving.cancel()
            if body.get("stream"):
                response.body_iterator = as_openai_streams(response.body_iterator)
            elif self.calls:
                return JSONResponse(self.calls.into(json.loads(response.body)))
            return response

    class Chats(Checked, compat.tokenizer_of_each_request(ChatCompletionHandler)):
        def prompt(self, body: dict[str, Any]) -> list[int]:
            messages: Any = body.get("messages")
            if problem := not_text(messages):
                raise UserError(problem)
            # Only these fields: transformers drops the content of a message with `tool_calls`, even an empty list.
            texts = [{"role": each["role"], "content": each.get("content") or ""} for each in messages]
            body["messages"] = self.get_processor_inputs_from_messages(texts, Modality.LLM)
            if tools := tools_asked(body):
                chat.check_tools(tools)
            check_size(characters_of(body["messages"], messages, tools), characters, context)
            self.calls = CallReader(chat) if tools else None
            return chat.prompt(whole_messages(body["messages"], messages), tools)

    class Texts(Checked, compat.tokenizer_of_each_request(CompletionHandler)):
        def prompt(self, body: dict[str, Any]) -> list[int]:
            if not isinstance(body.get("prompt"), str):
                raise UserError("prompt must be a string.")
            if body.get("tools"):
                raise UserError("tools is not supported here: ask for a chat completion.")
            check_size(len(body["prompt"]), characters, context)
            return chat.tokenizer(body["prompt"])["input_ids"]  # type: ignore[return-value]

    return Chats, Texts


async def as_openai_streams(pieces: AsyncIterator[str]) -> AsyncIterator[str]:
    """Yield a stream of transformers with the end of an OpenAI stream.

    An error message of transformers in the middle is not valid JSON if it has a quote.
    """
    async for piece in pieces:
        before, error, words = piece.partition('data: {"error": "')  # within JSON each quote has a backslash
        yield before + (f"data: {json.dumps(openai_error(' '.join(words[:-4].split()), 500))}\n\n" if error else "")
    yield "data: [DONE]\n\n"


if __name__ == "__main__":
    run(main)
