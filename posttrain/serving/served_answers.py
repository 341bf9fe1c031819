"""Where does a served answer end?  With the stop token, before a stop text, at its longest length, or with its client.

transformers' own server calls an answer cut if its last token is the stop token at the longest length, returns the stop
text, finds one that starts in the prompt, and continues after the client of a whole answer has disconnected. `Answers`
replaces its manager.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from tokenizers.decoders import DecodeStream
from transformers.cli.serving.utils import GenerateManager, GenerationState, response_events_to_chunks
from transformers.generation.streamers import BaseStreamer

from posttrain.runtime import compat


class Cutter:
    """A filter that ends a text before the first of several stop texts, however the text is cut into pieces.

    >>> cutter = Cutter(["The end"])
    >>> [cutter.take(piece) for piece in ("So. T", "he", "re. The e", "nd of it")], cutter.stopped
    (['So. ', '', 'There. ', ''], True)
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops, self.stopped, self._held = stops, False, ""

    def take(self, piece: str) -> str:
        """Return the text that can be sent now; the beginning of a stop text is held back until the next piece."""
        text, self._held = self._held + piece, ""
        ends = [(at + len(stop), at) for stop in self.stops if (at := text.find(stop)) >= 0]
        if ends:  # the one that is complete first
            self.stopped = True
            return text[: min(ends)[1]]
        sizes = [range(1, min(len(stop), len(text) + 1)) for stop in self.stops]
        begun = (n for stop, some in zip(self.stops, sizes, strict=True) for n in some if text.endswith(stop[:n]))
        keep = max(begun, default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def rest(self) -> str:
        """Return the text that was held back, after the last piece."""
        held, self._held = self._held, ""
        return held


class Ended(Exception):
    """Raised to end an answer: a stop text is complete, or the client has disconnected."""


class Writer(BaseStreamer):
    """A streamer of `generate` that sends text to a queue of transformers' server and ends at a stop text.

    tokenizer: of the library `tokenizers`
    parser: separates content and thought of a reasoning model; otherwise None
    ends: the ids of the tokens that end an answer
    stopped: whether the answer ended with its stop token or a stop text
    """

    def __init__(
        self, tokenizer: Any, parser: Any, stops: Sequence[str], ends: Sequence[int], send: Callable[[Any], None]
    ) -> None:
        self.tokenizer, self.parser, self.ends, self.send = tokenizer, parser, ends, send
        self.cutter, self.text = Cutter(stops), ""
        self.ids: list[int] = []
        self.stopped = self._cancelled = self._started = False
        self._plain, self._decoded = parser is None, ""  # a parser looks for special tokens
        self._decoding = DecodeStream([], skip_special_tokens=self._plain)
        if parser is not None:
            self._send_events(parser.initial_events)

    @property
    def total_tokens(self) -> int:
        return len(self.ids)

    def cancel(self) -> None:
        self._cancelled = True

    def put(self, value: Any) -> None:
        if self._cancelled:
            raise Ended
        if not self._started:  # the prompt
            self._started = True
            return
        for token in value.tolist():
            self.ids.append(token)
            self.stopped = token in self.ends
            piece = self._decoding.step(self.tokenizer, token) or ""
            self._decoded += piece
            self._send_text(self.cutter.take(piece))
            if self.cutter.stopped:
                self.stopped = True
                raise Ended

    def end(self) -> None:
        pass

    def close(self) -> None:
        """Send the text that was held back, also an incomplete character at the end."""
        if not self.cutter.stopped:
            whole = self.tokenizer.decode(self.ids, skip_special_tokens=self._plain)
            half = whole[len(self._decoded) :] if whole.startswith(self._decoded) else ""
            self._send_text(self.cutter.take(half) + self.cutter.rest())
        if self.parser is not None:
            with suppress(ValueError, RuntimeError):  # cut within a field, such as a tool call
                self._send_events(self.parser.finalize()[1])

    def _send_text(self, text: str) -> None:
        self.text += text
        if text and self.parser is not None:
            self._send_events(self.parser.feed(text))
        elif text:
            self.send(text)

    def _send_events(self, events: list[dict[str, Any]]) -> None:
        for item in response_events_to_chunks(events):
            self.send(item)


class Answers(GenerateManager):
    """A manager that answers one request after another, in its own thread."""

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
    ) -> tuple[asyncio.Queue[Any], Any]:
        """Return a queue that receives pieces of text, then None or an error, and the writer that fills it.

        transformers compares the length with `max_new_tokens` of `gen_config` to see whether the answer was cut. So an
        answer that has ended removes that limit.
        """
        loop, queue = asyncio.get_running_loop(), asyncio.Queue()
        stops, gen_config.stop_strings = gen_config.stop_strings or [], None
        ends = gen_config.eos_token_id
        ends = [ends] if isinstance(ends, int) else ends or []

        def send(item: Any) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, item)

        parser = processor.calls or response_parser
        writer = Writer(processor.backend_tokenizer, parser, stops, ends, send)

        def write() -> None:
            try:
                with suppress(Ended):
                    model.generate(**inputs, streamer=writer, generation_config=gen_config)
                writer.close()
            except Exception as error:  # sent to the client; the server continues
                send(compat.stream_error()(str(error)))
                return
            if writer.stopped:
                gen_config.max_new_tokens = None
            send(None)

        self.submit(write)
        return queue, writer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, list[int]]:
        """Return text, prompt length and ids of a whole answer; cancelling this ends the generation."""
        stops, failure = gen_config.stop_strings or [], compat.stream_error()
        queue, writer = self.generate_streaming(model, processor, inputs, gen_config, request_id)
        try:
            while (item := await queue.get()) is not None:
                if isinstance(item, failure):
                    raise RuntimeError(item.msg)
        except asyncio.CancelledError:
            writer.cancel()
            raise
        # transformers would parse the ids, which include the stop text
        processor.written = Cutter(stops).take(processor.decode(writer.ids, skip_special_tokens=False))
        return writer.text, inputs["input_ids"].shape[-1], writer.ids


class OneByOne(GenerationState):
    """The state of transformers' server, with `Answers` as its manager."""

    def __init__(self) -> None:
        super().__init__()
        self._answers = Answers()

    def get_manager(self, model_id: str, use_cb: bool = False) -> Answers:
        return self._answers


def reader_of(tokenizer: Any) -> Callable[[list[int]], Any]:
    """Return a function that makes the tokenizer of a request from the ids of its prompt.

    transformers would tokenize in the event loop, and would read control tokens in the texts of a chat.
    """
    import torch
    from transformers import BatchEncoding

    class WithPrompt(type(tokenizer)):
        prompt: Any
        calls: Any = None  # what reads calls of tools in the answer to a request with tools
        written = ""  # the answer, with its special tokens

        def __call__(self, *_: Any, **__: Any) -> Any:
            return self.prompt

        def apply_chat_template(self, *_: Any, **__: Any) -> Any:
            return self.prompt

        def parse_response(self, _: Any, *rest: Any, **more: Any) -> Any:
            if self.calls:
                return {"content": self.calls.said.content}
            return super().parse_response(self.written, *rest, **more)

    def read(ids: list[int]) -> Any:
        one, ids_1T = copy.copy(tokenizer), torch.tensor([ids])
        one.__class__ = WithPrompt
        one.prompt = BatchEncoding({"input_ids": ids_1T, "attention_mask": torch.ones_like(ids_1T)})
        return one

    return read
