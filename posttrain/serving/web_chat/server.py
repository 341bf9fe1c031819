"""How is the page served?  gradio's application with both tabs, its address and its password."""

from __future__ import annotations

import getpass
import html
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.config import ChatRun
from posttrain.types import UserError

if TYPE_CHECKING:
    from posttrain.serving.generation import Generator

PASSWORD = "CHAT_PASSWORD"  # an environment variable: every user of a machine can read a command line


def require_gradio() -> None:
    """Turn gradio's telemetry off.

    Raises:
        UserError: gradio is missing.
    """
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ["GRADIO_ANALYTICS_CACHE_FREQUENCY"] = str(
        1 << 60
    )  # otherwise it keeps figures of each event, with pandas
    try:
        import gradio  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"--web needs the package gradio ({error}). Run `pip install .` in this project's folder. Without"
            " --web the chat is in the terminal."
        ) from error


def chosen_password() -> str:
    """Return the password from the environment, or from the terminal without echo."""
    password = os.environ.get(PASSWORD)
    if password is None and sys.stdin.isatty():
        password = getpass.getpass("Password for the page: ")
    if not password:
        raise UserError(
            f"--password: set the environment variable {PASSWORD} to the password, or type it in a terminal."
        )
    return password


def build_page(generators: dict[str, Generator], cfg: ChatRun, password: str | None, *, local: bool = True) -> Any:
    """Build the page as an application of FastAPI. generators: one or two models by the names that the page shows.

    local: whether only this machine reaches the page.
    """
    require_gradio()
    import gradio
    from fastapi import FastAPI

    from envs.guard import OwnPagesOnly, WholeRequests
    from posttrain.serving.web_chat.about import describe_models
    from posttrain.serving.web_chat.events import ONE_AT_A_TIME
    from posttrain.serving.web_chat.guard import Password, Visitors, most_bytes, one_place_a_page
    from posttrain.serving.web_chat.playing import PlayTab
    from posttrain.serving.web_chat.talking import ChatTab

    abouts = describe_models(generators, cfg)
    names = " and ".join(about.title for about in abouts.values())
    title = "Chat" if password is not None else f"Chat with {names}"  # shown before the login
    with gradio.Blocks(title=title, analytics_enabled=False) as page:
        gradio.HTML(
            f"<h1>{html.escape(names)}</h1>", elem_id="title",
            js_on_load=Path(__file__).with_name("lists.js").read_text(encoding="utf-8"),
        )  # fmt: skip
        with gradio.Tab("Chat"):
            ChatTab(generators, cfg, abouts).build()
        with gradio.Tab("Play") as play:
            PlayTab(generators, cfg, abouts).build(play)
    one_place_a_page(page, ONE_AT_A_TIME["concurrency_id"])
    if password is not None:  # the login page would list every event, with the models' names
        page.get_api_info = lambda *_, **__: {"named_endpoints": {}, "unnamed_endpoints": {}}

    app = gradio.mount_gradio_app(
        FastAPI(docs_url=None, redoc_url=None, openapi_url=None),
        page,
        "/",
        app_kwargs={"openapi_url": None},
        auth=Password(password).allows if password is not None else None,
        auth_message="Any user name will do.",
        footer_links=[],
        run_history=False,
        enable_monitoring=False,
        max_file_size=1,  # nobody uploads anything
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
        theme=theme(),
        css=Path(__file__).with_name("page.css").read_text(encoding="utf-8"),
    )
    app.add_middleware(WholeRequests, most=most_bytes)  # the middleware that is added last sees a request first
    if password is not None:
        app.add_middleware(Visitors, gradio_app=app.routes[-1].app)  # type: ignore[attr-defined]
    app.add_middleware(OwnPagesOnly, local=local and password is None)
    return app


def theme() -> Any:
    """Return gradio's own look with the fonts of the system and readable colours (WCAG 2.2, 1.4.3)."""
    from gradio.themes import Default, Font

    system, code = (Font("system-ui"), Font("sans-serif")), (Font("ui-monospace"), Font("monospace"))
    readable = {
        "body_text_color_subdued": "*neutral_600",
        "block_info_text_color": "*neutral_600",
        "block_label_text_color": "*neutral_600",
        "block_title_text_color": "*neutral_600",
        "input_placeholder_color": "*neutral_500",
        "color_accent": "*primary_700",
        "button_primary_background_fill": "*primary_600",
        "button_primary_background_fill_hover": "*primary_700",
    }
    dark = {f"{name}_dark": "*neutral_300" for name, colour in readable.items() if "neutral" in colour}
    return Default(primary_hue="blue", font=system, font_mono=code).set(**readable, **dark)


def serve_page(generators: dict[str, Generator], cfg: ChatRun, listening: socket.socket, password: str | None) -> None:
    """Serve the web chat until Ctrl-C.

    Args:
        generators: one or two models by name.
        cfg: config of the chat.
        listening: socket of `listen`.
        password: of `chosen_password`; None for a page without one.
    """
    import uvicorn

    from envs.guard import patient_protocol
    from envs.web import is_loopback

    host, port = listening.getsockname()[:2]
    app = build_page(generators, cfg, password, local=is_loopback(host))
    # Each open page holds a connection: the end does not wait for them, nor log each of them.
    config = uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1, http=patient_protocol())
    server = uvicorn.Server(config)
    print(f"Chat with {', '.join(generators)} at http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
    server.run(sockets=[listening])
