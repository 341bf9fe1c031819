"""Which Modelfile lets Ollama write conversations as the chat template does, and where does it write them otherwise?"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

LONGEST = 8192  # tokens: Ollama keeps memory for all of them, and takes 4,096 where nothing is written
Said = tuple[str, str]  # role and content of a message
MARKS = {role: f"<<{role}>>" for role in ("system", "user", "assistant")}
# Conversations that a template may write otherwise than as a sequence of unchanged messages, and how to say so.
PROBES: dict[str, list[Said]] = {
    "thoughts of earlier answers (<think>...</think>)": [
        ("user", "a"),
        ("assistant", "<think>\nb\n</think>\n\nc"),
        ("user", "d"),
    ],
    "spaces and line breaks around a message": [("user", " a \n"), ("assistant", "\n b "), ("user", " c ")],
    "a system message after the first message": [
        ("user", "a"),
        ("assistant", "b"),
        ("system", "c"),
        ("user", "d"),
    ],
}


class OllamaTemplate(NamedTuple):
    """A chat template in Ollama's language.

    text: the template. system: the message that the model's own template writes where there is none, or "".
    differences: what the model's own template does and this one does not, such as "refuses ...".
    """

    text: str
    system: str
    differences: list[str]


class _Parts(NamedTuple):
    """What stands before and after the content of each role's messages, and what asks for an answer at the end."""

    before: dict[str, str]
    after: dict[str, str]
    last: str
    system: str

    def put_together(self, messages: Sequence[Said]) -> str:
        """Return the text that Ollama makes of messages."""
        if self.system and messages[0][0] != "system":
            messages = [("system", self.system), *messages]
        return "".join(self.before[role] + content + self.after[role] for role, content in messages) + self.last


def modelfile(tokenizer: Any, context: int) -> list[str]:
    """Return the lines of Ollama's Modelfile for `model.gguf` beside it."""
    from posttrain.models import gguf_writer

    lines = ["FROM ./model.gguf\n", f"PARAMETER num_ctx {min(context, LONGEST)}\n"]
    if (stop := gguf_writer.stop_of(tokenizer)) is not None:
        words = json.dumps(tokenizer.convert_ids_to_tokens(stop), ensure_ascii=False)
        lines.append(f"PARAMETER stop {words}\n")
    template = ollama_template(tokenizer)
    if template is None:
        return [
            *lines,
            "# The chat template has no form in Ollama's language: Ollama takes what it knows of the file's.\n",
        ]
    lines += [f'SYSTEM """{template.system}"""\n'] if template.system else []
    lines += [f"# The model's own chat template {each}. TEMPLATE does not.\n" for each in template.differences]
    return [*lines, f'TEMPLATE """{template.text}"""\n']


def ollama_template(tokenizer: Any) -> OllamaTemplate | None:
    """Return the chat template in Ollama's language, with the system message that it writes where there is none.

    Read off conversations that the template writes: what stands before, between and after their messages. None where
    a conversation of a system message, questions and answers that is put together from these parts is not that of the
    template. Whether others are is said in `differences`.
    """

    def written(messages: Sequence[Said]) -> str:
        given = [{"role": role, "content": content} for role, content in messages]
        text: str = tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=True)
        begins = tokenizer.bos_token_id in tokenizer("a")["input_ids"][:1]  # Ollama puts it first by itself
        return text.removeprefix(tokenizer.bos_token) if begins else text

    parts = _parts_of(written)
    if parts is None:
        return None
    before, after = parts.before, parts.after
    before_actions = (*before.values(), *after.values())
    if any("{{" in each or '"""' in each for each in (*before_actions, parts.last, parts.system)):
        return None
    if any(each.endswith("{") for each in before_actions):  # {{{ begins an action with a brace in it
        return None
    text = (
        f'{{{{ range .Messages }}}}{{{{ if eq .Role "system" }}}}{before["system"]}{{{{ .Content }}}}{after["system"]}'
        f'{{{{ else if eq .Role "user" }}}}{before["user"]}{{{{ .Content }}}}{after["user"]}'
        f'{{{{ else if eq .Role "assistant" }}}}{before["assistant"]}{{{{ .Content }}}}{after["assistant"]}'
        f"{{{{ end }}}}{{{{ end }}}}{parts.last}"
    )
    differences = []
    for name, probe in PROBES.items():
        try:
            if written(probe) != parts.put_together(probe):
                differences.append(f"changes {name}")
        except Exception:  # a template may refuse any message
            differences.append(f"refuses {name}")
    return OllamaTemplate(text, parts.system, differences)


def _parts_of(written: Callable[[Sequence[Said]], str]) -> _Parts | None:
    """Return the parts of which a template makes plain conversations, or None if they are not made of such parts.

    Args:
        written: writes a conversation by the template; it may raise.
    """

    def pieces(*roles: str) -> list[str]:
        """Return what stands before, between and after the messages of these roles."""
        found = re.split("|".join(map(re.escape, MARKS.values())), written(_marked(*roles)))
        if len(found) != len(roles) + 1:
            raise ValueError("a message is written twice or not at all")
        return found

    plain = ("user", "assistant", "user")
    longer = ("system", *plain, "assistant", "user")
    try:
        opening, between, answered, asking, last = pieces("system", *plain)
        first = pieces(*plain)[0]
        checked = {roles: written(_marked(*roles)) for roles in (plain, longer)}
    except Exception:  # a template may raise anything, e.g. where it refuses a system message
        return None
    try:
        late = pieces("user", "assistant", "system", "user", "system", "user")
    except Exception:  # as above, in mid-conversation
        late = []
    # What stands before a system message shows how an answer and a question end. Where the first system message begins
    # otherwise than later ones, a question begins with what is the same after all other messages: its end is then
    # counted to what comes after it.
    ends = [(late[2].removesuffix(opening), late[4].removesuffix(opening))] if late else []
    backwards = zip(*(each[::-1] for each in (between, asking, first)), strict=False)
    same = "".join(letters[0] for letters in itertools.takewhile(lambda each: len(set(each)) == 1, backwards))[::-1]
    for of_answer, of_question in [*ends, (asking.removesuffix(same), "")]:
        user = asking.removeprefix(of_answer)
        of_system, default = between.removesuffix(user), first.removesuffix(user)
        parts = _Parts(
            before={"system": opening, "user": user, "assistant": answered.removeprefix(of_question)},
            after={"system": of_system, "user": of_question, "assistant": of_answer},
            last=last.removeprefix(of_question),
            system=default.removeprefix(opening).removesuffix(of_system),
        )
        if all(parts.put_together(_marked(*roles)) == text for roles, text in checked.items()):
            return parts
    return None


def _marked(*roles: str) -> list[Said]:
    return [(role, MARKS[role]) for role in roles]
