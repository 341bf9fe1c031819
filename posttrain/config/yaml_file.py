"""How is a config file read?  As YAML with the plain scalars of version 1.2, and without repeated keys."""

from __future__ import annotations

import json
import re
import typing
from pathlib import Path
from typing import Any

import yaml

from posttrain.files import read_text
from posttrain.types import UserError

NOT_IN_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufffe\uffff]")


class StrictLoader(yaml.SafeLoader):
    """2e-5 is a number, `no` is text, 010 is ten, 2026-01-01 is text; a repeated key and an alias (`*name`) are errors.

    With aliases of aliases a few lines could mean more values than fit into any memory.
    """

    yaml_implicit_resolvers: typing.ClassVar[dict[str, Any]] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key.value, str) and key.value in seen:
                words = f"the key `{key.value}` is written twice"
                raise yaml.constructor.ConstructorError(None, None, words, key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            at = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(None, None, "an alias (`*name`) is not read here: write its value", at)
        return super().compose_node(parent, index)


for _tag, _pattern, _first, _build in (
    ("null", r"~|null|Null|NULL|", [*"~nN", ""], lambda text: None),
    ("bool", r"true|True|TRUE|false|False|FALSE", [*"tTfF"], lambda text: text.lower() == "true"),
    ("int", r"[-+]?[0-9]+(?:_[0-9]+)*", [*"-+0123456789"], int),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", [*"-+.0123456789"], float),
):
    StrictLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)
    StrictLoader.add_constructor(f"tag:yaml.org,2002:{_tag}", lambda _, node, build=_build: build(node.value))


def parse_yaml(text: str) -> Any:
    """Return the value of YAML text.

    Raises:
        ValueError: it is not YAML, nested too deep, or a number has too many digits.
    """
    try:
        return yaml.load(text, StrictLoader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except RecursionError:
        raise ValueError("its brackets or lines are nested too deep") from None


def yaml_value(value: Any) -> str:
    """Return a value on one line of JSON, which `parse_yaml` reads back.

    Characters beyond U+FFFF stay as they are: YAML does not join the two escapes that JSON has for one. Characters that
    YAML refuses, or takes for the end of a line, are escaped.
    """
    return NOT_IN_YAML.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))


def read_yaml(file: Path) -> dict[str, Any]:
    """Return the keys of a YAML file.

    Raises:
        UserError: it cannot be read, or does not hold keys.
    """
    text = read_text(file, "Name another one.")
    try:
        content = parse_yaml(text)
    except ValueError as error:
        raise UserError(f"{file} is not YAML: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{file} should contain lines of `key: value`, but contains a {type(content).__name__}.")
    return content
