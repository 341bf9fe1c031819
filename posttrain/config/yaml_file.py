"""How is a config file read?  As YAML with the plain scalars of version 1.2, and without repeated keys."""

from __future__ import annotations

import re
import typing
from pathlib import Path
from typing import Any

import yaml

from posttrain.types import UserError


class StrictLoader(yaml.SafeLoader):
    """2e-5 is a number, `no` is text, 010 is ten, 2026-01-01 is text, and a repeated key is an error."""

    yaml_implicit_resolvers: typing.ClassVar[dict[str, Any]] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for n, key in enumerate(keys):
            if key in keys[:n]:
                at = node.value[n][0].start_mark
                raise yaml.constructor.ConstructorError(None, None, f"the key `{key}` is there twice", at)
        return super().construct_mapping(node, deep)


for _tag, _pattern, _first, _build in (
    ("null", r"~|null|Null|NULL|", [*"~nN", ""], lambda text: None),
    ("bool", r"true|True|TRUE|false|False|FALSE", [*"tTfF"], lambda text: text.lower() == "true"),
    ("int", r"[-+]?[0-9]+(?:_[0-9]+)*", [*"-+0123456789"], int),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", [*"-+.0123456789"], float),
):
    StrictLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)
    StrictLoader.add_constructor(f"tag:yaml.org,2002:{_tag}", lambda _, node, build=_build: build(node.value))


def read_yaml(file: Path) -> dict[str, Any]:
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), StrictLoader)
    except OSError as error:
        raise UserError(f"The file {file} cannot be read ({error.strerror}): name another one.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UserError(f"{file} should hold lines of `key: value`, but as a whole is a {type(content).__name__}.")
    return content
