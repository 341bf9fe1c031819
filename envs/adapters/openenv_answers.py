"""What may an OpenEnv server answer?  Anything else is a ServerError that says what is wrong."""

from __future__ import annotations

import json
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Field, FiniteFloat, TypeAdapter, ValidationError

from envs.web import NoAnswer

MESSAGE = 16 << 20  # bytes of the longest answer that is read
TEXT = 100_000  # characters of the longest text that is shown


class ServerError(NoAnswer, ConnectionError, ValueError):
    """A server that cannot be reached, is gone, is too slow, or says that something went wrong."""


class NotOffered(ServerError):
    """The server answers, but does not have this."""


class JsonSchema(BaseModel):
    """A JSON schema of an action or a state."""

    properties: dict[str, dict[str, Any]] = {}
    required: list[str] = []


class Schema(BaseModel):
    action: JsonSchema
    state: JsonSchema = JsonSchema()


class Metadata(BaseModel):
    description: str | None = Field(None, max_length=TEXT)


class State(BaseModel):
    max_turns: int | None = Field(None, ge=0)
    actions: list[str] | None = None
    styles: list[str] = []


class Split(BaseModel):
    name: str
    type: Literal["train", "validation", "test"]


class Count(BaseModel):
    num_tasks: int


class Beside(BaseModel):
    """What is understood of the metadata of an observation."""

    success: bool | None = None
    truncated: bool | None = None
    action_is_valid: bool | None = None


class StepResult(BaseModel):
    observation: dict[str, Any] | None = None
    reward: FiniteFloat | bool | None = None
    done: bool | None = False
    metadata: dict[str, Any] | None = None


class Observed(BaseModel):
    metadata: dict[str, Any] | None = None


class Message(BaseModel):
    role: Literal["system", "user", "assistant", "tool"]
    content: str = Field(max_length=TEXT)


class Opening(BaseModel):
    """What the server of openenv_server.py adds to the first observation."""

    rules: str = Field("", max_length=TEXT)
    actions: list[str] | None = None
    action_word: str = Field("", max_length=TEXT)
    example_thought: str = Field("", max_length=TEXT)
    example_actions: list[str] | None = None
    example_state: str = Field("", max_length=TEXT)
    messages: list[Message] | None = Field(None, min_length=1)


T = TypeVar("T")


def checked(kind: type[T], value: Any, source: str) -> T:
    """Return the answer as this type, nothing converted."""
    try:
        return TypeAdapter(kind).validate_python(value, strict=True)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the whole"
        raise ServerError(f"{source} cannot be understood: {place}: {first['msg']}.") from None


def readable_field(data: dict[str, Any], field: str) -> str:
    """Return the field of an observation that is to be read, `text` unless another is named; else all, a line each."""
    field = field or ("text" if "text" in data else "")
    if field and field not in data:
        raise ServerError(f'The observation has no field "{field}", only {", ".join(data)}: name one of them.')
    if field:
        return data[field] if isinstance(data[field], str) else json.dumps(data[field])
    return "\n".join(f"{key}: {value if isinstance(value, str) else json.dumps(value)}" for key, value in data.items())
