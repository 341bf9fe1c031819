"""Which settings does a run have?  YAML < dotted overrides; all errors at once with their paths, exit code 2."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from posttrain.config import suggestions
from posttrain.config.reference import as_started, find_config
from posttrain.config.shared import Section, hint
from posttrain.config.trl_fields import NOT_SUPPORTED, SET_BY_SCRIPTS, TRLFields
from posttrain.config.yaml_file import parse_yaml, read_yaml
from posttrain.files import failed_write, keep_standard_streams, lost, out_of_memory
from posttrain.types import UserError, for_terminal

Config = TypeVar("Config", bound=Section)


def run(main: Callable[[], None]) -> NoReturn:
    """Run `main` as a command, then exit: an error that the user can fix is one paragraph on stderr and exit code 2.

    Ctrl-C gives exit code 130, and a process that has lost the other processes exits with 1. The command continues when
    nobody reads its output.
    """
    keep_standard_streams()
    try:
        main()
    except UserError as problem:
        print(f"error: {for_terminal(as_started(str(problem)))}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if (words := failed_write(error) or out_of_memory(error) or no_answer(error)) is not None:
            print(f"error: {words}", file=sys.stderr)
            sys.exit(2)
        if (words := lost(error)) is None:
            raise
        print(f"error: {words}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)  # an orderly end would wait for the others as well
    sys.exit(0)


def no_answer(error: Exception) -> str | None:
    """Return what to tell the user where a server, or math-verify's process, does not answer; None for other errors.

    Importing `envs.web.NoAnswer` here would load every environment before the config is read.
    """
    return str(error) if "NoAnswer" in {each.__name__ for each in type(error).__mro__} else None


def load(
    schema: type[Config],
    default: str | Path,
    argv: list[str] | None = None,
    add_arguments: Callable[[argparse.ArgumentParser], object] | None = None,
    description: str | None = None,
) -> tuple[Config, argparse.Namespace]:
    """Return the run's config from a YAML file and dotted overrides, and the flags of the command line.

    Args:
        schema: model of the config, as SFTRun.
        default: the config file without `--config`.
        argv: words of the command line; None for those of this process.
        add_arguments: adds the command's own flags to the parser.
        description: first part of `--help`, the docstring of the script.

    Returns:
        The validated config, and the flags.

    Raises:
        UserError: a file, a key or a value is wrong, or a function that it names is not there.
    """
    parser = argparse.ArgumentParser(
        prog=Path(sys.argv[0]).name,  # as Python before 3.14 has it
        description=as_started(description or ""),
        epilog="keys of the YAML file and of the overrides:\n" + "\n".join(_describe(schema)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="KEY=VALUE", help="e.g. seed=1, or model.tuning=lora"
    )
    parser.add_argument(
        "--config", default=str(default), metavar="FILE",
        help="YAML file, or the name of a reference config such as quickstart/phase1_sft (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--print-config", action="store_true", help="print the resolved config as YAML and stop")
    if add_arguments:
        add_arguments(parser)
    args, unknown = parser.parse_known_intermixed_args(_plan_of_all(sys.argv[1:] if argv is None else argv))
    if unknown:
        raise UserError(_no_options(parser, schema, args.config, unknown, sys.argv[1:] if argv is None else argv))
    cfg = resolve(schema, args.config, args.overrides)
    if args.print_config:
        print(dump(cfg), end="")
        sys.exit(0)
    from posttrain.config.plugins import find_functions  # it loads the environments, which --help does not need

    find_functions(cfg)
    return cfg, args


def training_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that all three phases have."""
    parser.add_argument("--resume", action="store_true", help="continue from the newest whole checkpoint in output_dir")
    parser.add_argument(
        "--plan", nargs="?", const="all", metavar="DEVICE",
        help="print memory, seconds, hours and cost before anything is loaded, for all devices or one (A10G, 8xH100,"
        " 2x8xH100, cpu); a device on which this run does not fit is refused",
    )  # fmt: skip


def _plan_of_all(argv: Sequence[str]) -> list[str]:
    """Return the arguments with `--plan=all` for a `--plan` before an override: `--plan seed=1` names no device."""
    return [
        "--plan=all" if text == "--plan" and "=" in "".join(argv[place : place + 1]).partition(":")[0] else text
        for place, text in enumerate(argv, start=1)
    ]


def resolve(schema: type[Config], file: str | Path, overrides: list[str] | None = None) -> Config:
    """Return the validated config of one YAML file with overrides: a preset < the file < the overrides.

    A preset in an override replaces the file's section that names it (`algorithm`, `protocol`), and the preset's other
    keys replace the file's.

    Args:
        schema: model of the config, as SFTRun.
        file: a path, or the name of a reference config.
        overrides: as on the command line, e.g. ["trainer.learning_rate=1e-5"].

    Raises:
        UserError: a file, a key or a value is wrong.
    """
    values = read_yaml(find_config(file))
    problems: list[str] = []
    changed: list[tuple[str, ...]] = []
    overrides = list(overrides or ())
    for section in schema.preset_sections:
        named = [text for text in overrides if text.partition("=")[0] == f"{section}.preset"]
        for text in [f"{section}={{}}", *named] if named else ():
            with contextlib.suppress(UserError):  # reported below
                _override(values, text)
        if named:
            values = _merge(values, schema.preset_keys({section: values.get(section)}))
    for text in overrides:
        try:
            if "=" not in text and (meant := suggestions.argument(schema, values, text)):
                raise UserError(f"`{text}` is not an override: write {meant}")
            changed.append(_override(values, text))
        except UserError as problem:
            problems.append(str(problem))
    try:
        config = schema.model_validate(_merge(schema.preset_keys(values), values))
    except ValidationError as error:
        if other := suggestions.other_script(schema, file):
            raise UserError(other) from None
        problems += _explain_all(schema, error, changed, values)
    else:
        if not problems:
            return config
    raise UserError("\n  ".join([f"{file} with its overrides has these errors:", *problems]))


def dump(cfg: BaseModel) -> str:
    """Return YAML that `resolve` reads back to the same config."""
    return yaml.safe_dump(cfg.model_dump(), sort_keys=False, allow_unicode=True, width=120)


def _override(values: dict[str, Any], text: str) -> tuple[str, ...]:
    """Write one `a.b.0.c=value` into the nested dicts and lists of `given`; returns its path."""
    key, equals, value = text.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or not all(path) or len(path) > 20:
        raise UserError(
            f"`{text}` is not an override: write KEY=VALUE with a dotted key, e.g. trainer.learning_rate=1e-5."
        )
    try:
        new = parse_yaml(value)
    except ValueError as error:
        raise UserError(f"The value of `{text[:200]}` is not YAML: {error}") from None
    at: Any = values
    for depth, name in enumerate(path):
        above = ".".join(path[:depth])
        if isinstance(at, list) and not (re.fullmatch("[0-9]{1,9}", name) and int(name) < len(at)):
            raise UserError(f"`{text}`: {above} is a list of {len(at)}, so `{name}` must be a number below {len(at)}.")
        if not isinstance(at, dict | list):
            instead = ""
            if isinstance(at, str) and above.rpartition(".")[2].isdigit():  # an environment or a file by its name alone
                key = "path" if "sources" in path else "name"
                instead = f" Write `{above}={{{key}: {at}, {name}: ...}}`."
            raise UserError(f"`{text}`: {above} is {_short(at)} and has no keys.{instead}")
        key_here: Any = int(name) if isinstance(at, list) else name
        if depth == len(path) - 1:
            at[key_here] = new
        elif isinstance(at, dict) and at.get(key_here) is None:
            at[key_here] = {}
        at = at[key_here]
    return path


def _merge(under: Any, over: Any) -> Any:
    """Return `over` laid on `under`: sections key by key, everything else (lists too) as a whole."""
    if not (isinstance(under, dict) and isinstance(over, dict)):
        return over
    return under | {key: _merge(under[key], value) if key in under else value for key, value in over.items()}


# ------------------------------------------------------------------------------------------------- errors and help

_WORDING = {
    "string_type": "should be text",
    "int_type": "should be a whole number",
    "float_type": "should be a number",
    "bool_type": "should be true or false",
    "list_type": "should be a list",
    "dict_type": "should be a section",
    "model_type": "should be a section",
    "too_short": "must not be empty",
    "string_too_short": "must not be empty",
}


def _explain_all(
    schema: type[BaseModel], error: ValidationError, changed: list[tuple[str, ...]], values: dict[str, Any]
) -> list[str]:
    """Return a line for each wrong key: where it is, what is wrong, what to write instead."""
    lines: dict[str, list[str]] = {}
    for problem in error.errors(include_url=False):
        path = _path(schema, problem["loc"])
        where = ".".join(path) or "the whole"
        typed = any(path[: len(start)] == start for start in changed)
        where += " (on the command line)" if typed else ""
        text = _explain(schema, path, problem, values)
        if problem["type"] in ("model_type", "dict_type", "list_type"):
            text += suggestions.instead(schema, values, where.partition(" ")[0], problem["input"], typed)
        lines.setdefault(where, []).append(text)
    return [f"{where}: {', or '.join(texts)}" for where, texts in lines.items()]


def _path(schema: type[BaseModel], place: tuple[int | str, ...]) -> tuple[str, ...]:
    """Return pydantic's path without what it adds below a key that may have one of several types."""
    here: Any = schema
    path: list[str] = []
    for name in place:
        if str(name).startswith(":"):  # the tag of a type, no key
            continue
        path.append(str(name))
        if isinstance(here, TRLFields):
            break
        if isinstance(here, type) and name in here.model_fields:
            field = here.model_fields[str(name)]
            here = suggestions.field_inside(field)
            if here is None and typing.get_origin(field.annotation) not in (list, dict):
                break
    return tuple(path)


def _explain(schema: type[BaseModel], path: tuple[str, ...], problem: Any, values: dict[str, Any]) -> str:
    kind, value = problem["type"], problem["input"]
    if kind == "extra_forbidden":
        return _unknown(schema, path, values)
    if kind == "missing":
        main = suggestions.MAIN_KEY.get(".".join(path))
        value = f"{{{main}: ...}}" if main else "..."
        return f"missing; write `{path[-1]}: {value}` ({_at(schema, path[:-1]).model_fields[path[-1]].description})"
    if kind == "text":
        return problem["ctx"]["text"]
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", problem["ctx"]["expected"])
        guess = hint(str(value), choices)
        listed = (
            f"one of {', '.join(choices)}" if len(choices) < 12 or not guess else f"one of the {len(choices)} choices"
        )
        return f"{_short(value)} is not {listed}{guess}"
    text = _WORDING.get(kind) or problem["msg"].removeprefix("Input ")
    text += f", but is {_short(value)}"
    if kind == "string_type" and isinstance(value, bool | int | float):
        text += f""" (in quotes it is text: '{value}' in a file, "'{value}'" on the command line)"""
    return text


def _unknown(schema: type[BaseModel], path: tuple[str, ...], values: dict[str, Any]) -> str:
    name, parent = path[-1], _at(schema, path[:-1])
    if isinstance(parent, TRLFields) and name in SET_BY_SCRIPTS:
        return f"not set here: {SET_BY_SCRIPTS[name]}"
    if path[0] == "trainer" and name in NOT_SUPPORTED:
        return f"not set here: {NOT_SUPPORTED[name]}"
    meant = suggestions.meant(schema, name, values)
    here = meant is not None and (len(path) == 1 or meant.rpartition(".")[0] == ".".join(path[:-1]))
    known_alias = here and name in suggestions.ALIASES
    if not known_alias and (close := suggestions.like(name, _keys(parent))):
        return f"unknown key; did you mean `{'.'.join((*path[:-1], close))}`?"
    if meant:
        return f"unknown key{'' if here and len(path) > 1 else ' here'}; did you mean `{meant}`?"
    if isinstance(parent, TRLFields):
        return f"unknown key; {parent.source.split(':')[1]} of the installed TRL has no such field"
    return f"unknown key; there are {', '.join(_keys(parent))}"


def _no_options(
    parser: argparse.ArgumentParser, schema: type[BaseModel], file: str, unknown: Sequence[str], argv: Sequence[str]
) -> str:
    """Return what to write instead of options such as `--learning_rate 1e-5`, as other trainers take them."""
    values: dict[str, Any] = {}
    with contextlib.suppress(UserError):  # the file is not what is wrong here
        values = read_yaml(find_config(file))
    write, nothing_like = [], []
    options = list(dict.fromkeys(each.partition("=")[0] for each in unknown if each.startswith("-")))
    for option in options:
        key = option.lstrip("-").replace("-", "_")
        if close := difflib.get_close_matches(option, list(parser._option_string_actions), n=1, cutoff=0.8):
            return f"{option} is not an option of this script; did you mean `{close[0]}`?"
        if key in NOT_SUPPORTED:
            return f"{option} is not an option of this script: {NOT_SUPPORTED[key]}."
        meant = suggestions.override(schema, values, key, _values_of(option, argv))
        write.append(meant) if meant else nothing_like.append(option)
    are = "are not options" if len(options) > 1 else "is not an option"
    message = f"{' and '.join(options)} {are} of this script. "
    message += f"Keys of the config are written KEY=VALUE: `{' '.join(write)}`." if write else ""
    if nothing_like:
        message += f"{' ' if write else ''}There is no key like {' or '.join(nothing_like)}; --help lists them."
    return message


def _values_of(option: str, argv: Sequence[str]) -> list[str]:
    """Return what follows an option on the command line: `--seed 1`, `--seed=1`, nothing behind a flag."""
    place = next(n for n, text in enumerate(argv) if text.partition("=")[0] == option)
    if "=" in argv[place]:
        return [argv[place].partition("=")[2]]
    following = argv[place + 1 :]
    end = next((n for n, text in enumerate(following) if text.startswith("--") or "=" in text), len(following))
    return list(following[:end])


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list):
        return "a list"
    return "empty" if value is None else repr(value)[:80]


def _at(schema: type[BaseModel], path: tuple[str, ...]) -> Any:
    """Return the section (or TRLFields) at a path, in which list positions and free names do not count."""
    here: Any = schema
    for name in path:
        if isinstance(here, type) and name in here.model_fields:
            here = suggestions.field_inside(here.model_fields[name])
    return here


def _keys(section: Any) -> list[str]:
    if isinstance(section, TRLFields):
        return list(section.allowed())
    return list(section.model_fields) if section is not None else []


def _describe(schema: type[BaseModel], depth: int = 1) -> Iterator[str]:
    """Yield the lines of --help: keys indented by section, with type, default and meaning."""
    for name, field in schema.model_fields.items():
        inside, pad = suggestions.field_inside(field), "  " * depth
        if isinstance(inside, type):
            listed = " (list)" if typing.get_origin(field.annotation) is list else ""
            yield f"{pad}{name}:{listed}  {field.description}"
            yield from _describe(inside, depth + 1)
            continue
        default = "required" if field.is_required() else yaml.safe_dump(field.default, default_flow_style=True)
        yield f"{pad}{name}: {_type_name(field.annotation)}  {field.description} [{default.splitlines()[0]}]"


def _type_name(annotation: Any) -> str:
    if typing.get_origin(annotation) is Annotated:
        return _type_name(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) is Literal:
        return "|".join(map(str, typing.get_args(annotation)))
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return "|".join("null" if part is type(None) else _type_name(part) for part in typing.get_args(annotation))
    plain = {str: "text", int: "whole number", float: "number", bool: "true|false", list: "list"}
    return plain.get(typing.get_origin(annotation) or annotation, "section")
