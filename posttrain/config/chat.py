"""The keys of inference_with_improved_settings.py."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, model_validator

from posttrain.config.shared import (
    CONTEXT,
    CONTEXT_TURNS,
    DEVICE,
    ChatSection,
    Context,
    Device,
    Env,
    Field,
    ModelSection,
    OwnFunction,
    ProtocolSection,
    SamplingSection,
    Section,
    hint,
    turns_where_counted,
    whole_context_with_tools,
    wrong,
)


def _not_blank(message: str) -> str:
    if not message.strip():
        raise wrong("an example is empty: write a message, or leave it out")
    return message


class ChatRun(Section):
    """Chat in the terminal, and watching the model play."""

    preset_sections = ("protocol",)

    model: ModelSection = Field("the model that answers")
    chat: ChatSection = Field("how messages become tokens", ChatSection())
    device: Device = Field(DEVICE, "auto")
    seed: int = Field("everything random is derived from it", 0, ge=0)
    hardware: str = Field("free text: what this file was written for", "")
    system: str | None = Field("system message; null leaves it out", None)
    examples: list[Annotated[str, AfterValidator(_not_blank)]] = Field(
        "messages that the chat offers at its start, fit for what the model was trained on", []
    )
    max_new_tokens: int = Field("longest answer", 512, ge=1)
    preset: str = Field(
        "the preset that answers; with --compare, the one whose answer stays in the conversation", "improved"
    )
    presets: dict[str, SamplingSection] = Field(
        "sampling settings by name",
        {
            "improved": SamplingSection(repetition_penalty=1.15, temperature=0.7, top_p=0.9, top_k=50),
            "plain": SamplingSection(),
            "greedy": SamplingSection(temperature=0.0),
        },
        min_length=1,
    )
    tools: list[OwnFunction] = Field(
        "MODULE:FUNCTION of each function that the model may call, with types and docstring; not with --compare", []
    )
    max_calls: int = Field("calls of tools in the answer to a message", 8, ge=1)
    call_seconds: float = Field("time that a call may take", 10.0, gt=0)
    envs: list[Env] = Field("options of the environments for --play; others have their defaults", [])
    protocol: ProtocolSection = Field("turns and answer format for --play; as in phase 3", ProtocolSection())
    max_completion_length: int = Field("new tokens in one turn of --play", 64, ge=1)
    context: Context = Field(CONTEXT + " (--play)", "full")
    context_turns: int | None = Field(CONTEXT_TURNS, None, ge=1)

    _context = model_validator(mode="after")(turns_where_counted)

    @model_validator(mode="after")
    def _known_preset(self) -> ChatRun:
        whole_context_with_tools(self.envs, self.context, "context")
        if self.preset not in self.presets:
            known = list(self.presets)
            raise wrong(f"`{self.preset}` is not a preset: write one of {', '.join(known)}{hint(self.preset, known)}")
        return self
