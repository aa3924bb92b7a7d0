"""Flags that several commands share, and flags for the fields of the config classes."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields
from functools import partial
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

from chairlift.cli import values
from chairlift.config import DEFAULT_MODEL, EngineConfig
from chairlift.errors import InvalidSetting, did_you_mean
from chairlift.sampling import SamplingParams
from chairlift.server.config import ServerConfig
from chairlift.settings import ENV_PREFIX, LARGEST_COUNT, default_in_words, from_environment, parse_value

C = TypeVar("C")

MODEL_SOURCES = (
    "a directory in Hugging Face's layout, a .gguf file, a hub name (org/name, org/name:Q4_K_M), an https address, or Ollama's name"
)
COMMON = {
    *("tokenizer", "chat_template", "device", "tensor_parallel_size", "threads", "dtype", "quantization", "max_model_len"),
    *("max_num_seqs", "max_num_batched_tokens", "scheduling_policy", "tenant_weights", "batching", "max_num_queued_reqs"),
    *("cpu_math", "kv_cache_memory_bytes", "replicas", "usage_log", "models", "max_loaded_models"),
    *("target_itl_ms", "journal", "num_kv_blocks", "gpu_memory_utilization", "kv_cache_dtype", "enable_prefix_caching", "swap_space"),
    *("host", "port", "served_model_name", "api_key", "api_key_file", "operator_key", "cors_allow_origins", "ssl_certfile", "ssl_keyfile"),
    *("admin_socket", "shutdown_timeout", "log_level", "log_format", "tool_call_parser", "reasoning_parser"),
}
"""The settings that `--help` shows; `--help-all` shows all."""

SESSIONS = "recorded sessions of agents (docs/capacity.md), or a folder with logs of Claude Code or Codex"
SIMULATED_MODEL = (
    f"a well-known model ('chairlift simulate --help' lists them), or one with files on this machine (default: {DEFAULT_MODEL})"
)


_MAX_USAGE = 8
"""Most flags that the line `usage` shows of a command; if there are more, it shows those that the command needs."""


class TextFormatter(argparse.RawDescriptionHelpFormatter):
    """Wraps paragraphs and columns of descriptions at the terminal's width, and leaves examples of commands whole."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(_wrapped(paragraph, width) for paragraph in text.rstrip().split("\n\n")) + "\n"


def _wrapped(paragraph: str, width: int) -> str:
    lines = paragraph.splitlines()
    if max(map(len, lines)) <= width:
        return paragraph
    if not any(line.startswith(" ") for line in lines):
        return textwrap.fill(paragraph, width)
    wrapped = []
    for line in lines:
        # What a column says beside a command. It begins in the middle at the latest.
        column = re.match(r" {9,}| +\S.*?  +", line)
        if column is None:
            wrapped.append(line)
            continue
        head, indent = line[: column.end()], " " * min(column.end(), width // 2)
        if len(head.rstrip()) >= len(indent):
            wrapped.append(head.rstrip())
            head = ""
        wrapped.append(textwrap.fill(line[column.end() :], width, initial_indent=head[: len(indent)] or indent, subsequent_indent=indent))
    return "\n".join(wrapped)


class HelpFormatter(TextFormatter):
    """Writes the value of a flag with several names once, as Python 3.13 does, and a short line `usage`."""

    def add_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[argparse._MutuallyExclusiveGroup],
        prefix: str | None = None,
    ) -> None:
        """Adds the line `usage`: the help below lists all flags."""
        every, groups = list(actions), list(groups)
        needed_groups = [group for group in groups if group.required]
        one_of = [action for group in needed_groups for action in group._group_actions]
        needed = [action for action in every if not action.option_strings or action.required or action in one_of]
        if len(every) - len(needed) > _MAX_USAGE:
            self._prog += " [flags]"
            every, groups = needed, needed_groups
        super().add_usage(usage, every, groups, prefix)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if len(action.option_strings) < 2 or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"


def add_command(
    commands: Any, name: str, summary: str, examples: str, run: Callable[[argparse.Namespace], int] | None = None
) -> argparse.ArgumentParser:
    """Adds a command to argparse's `commands`. `summary` is its line in the list of commands and its description."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=examples,
        formatter_class=HelpFormatter,
        allow_abbrev=False,  # an abbreviation breaks when a flag with the same beginning is added
    )
    parser.set_defaults(run=run)
    return parser


def add_model(
    parser: argparse.ArgumentParser, help: str = f"{MODEL_SOURCES} (default: {DEFAULT_MODEL})", *, positional: bool = True
) -> None:
    """Adds `--model`, and the model as a positional argument if `positional`."""
    help += f" [{ENV_PREFIX}MODEL]"
    if positional:
        parser.add_argument("model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, action=_Model, help=help)
        help = "MODEL as a flag"
    parser.add_argument("--model", metavar="MODEL", action=_Model, help=help)
    read_variable(parser, "model")


class _Model(argparse.Action):
    """Stores the model; it is an error to give it twice."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: Any, option: str | None = None) -> None:
        if value is None:
            return
        if getattr(namespace, "model", None) is not None:
            raise argparse.ArgumentError(self, f"the model is named twice: {namespace.model} and {value}")
        namespace.model = value


class Models(argparse.Action):
    """Stores the models of `serve` as `model_args`, and a single one as the model too."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        """Called with all positional arguments, none of them if there are none."""
        if not values:
            return
        if (model := getattr(namespace, "model", None)) is not None:
            raise argparse.ArgumentError(self, f"the model is named twice: {model} and {values[0]}")
        namespace.model_args = values
        if len(values) == 1:
            namespace.model = values[0]


def add_value(
    parser: argparse._ActionsContainer,
    names: str | tuple[str, ...],
    read: Callable[[str], Any],
    metavar: str,
    help: str,
    default: object = None,
) -> None:
    """Adds a flag with a value, of one or several names. Its help ends with the default, if it has one."""
    shown = "" if default is None else f" (default: {default:g})" if isinstance(default, float) else f" (default: {default})"
    every = (names,) if isinstance(names, str) else names
    parser.add_argument(*every, type=read, metavar=metavar, default=default, help=help + shown)


def add_burstiness(parser: argparse._ActionsContainer) -> None:
    """Adds `--burstiness`."""
    burstiness = values.number(0.01, 1e6, infinite=True)
    add_value(parser, "--burstiness", burstiness, "X", "1: Poisson arrivals; below 1: burstier; above: more even", 1.0)


def add_max_think_time(parser: argparse._ActionsContainer, default: float) -> None:
    """Adds `--max-think-time` for recorded sessions, None by default."""
    think = f"longest time between an answer and the next request of --sessions, in seconds (default: {default:g})"
    add_value(parser, "--max-think-time", values.number(0.0, 1e9), "S", think)


def add_json(parser: argparse._ActionsContainer) -> None:
    """Adds `--json`."""
    parser.add_argument("--json", action="store_true", help="print all figures as JSON, times in seconds")


def add_report(parser: argparse._ActionsContainer) -> None:
    """Adds `--report`."""
    help = "write a self-contained HTML page with plots; of a FILE.svg or FILE.png the plots alone"
    add_value(parser, "--report", values.output, "FILE", help)


def add_fields(
    parser: argparse.ArgumentParser,
    cls: type,
    names: Collection[str] | None = None,
    *,
    shown: Collection[str] = COMMON,
    texts: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Adds a flag for each field of the config class `cls` that has help, or for those in `names`, under its group's heading.

    The command also reads the fields' environment variables, and `--config`. `--help` hides fields that are not in `shown`. `texts` has
    help for fields whose meaning or default is the command's own.
    """
    help_all = next((action for action in parser._actions if isinstance(action, _HelpAll)), None)
    if help_all is None:
        help_all = _HelpAll(["--help-all"], "help_all", nargs=0, default=argparse.SUPPRESS, help="show all flags")
        parser._add_action(help_all)
        parser.add_argument("--config", metavar="FILE", help="read settings from a YAML file; flags and environment variables win")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for field in dataclasses.fields(cls):
        if "help" not in field.metadata or (names is not None and field.name not in names):
            continue
        heading = field.metadata["group"]
        if heading not in groups:
            groups[heading] = parser.add_argument_group(heading)
        action = groups[heading].add_argument(
            *_names(field), dest=field.name, default=argparse.SUPPRESS, help=_help(field, texts.get(field.name)), **_argument(field)
        )
        if field.name not in shown:
            help_all.hide(action)
        read_variable(parser, field.name)


def read_variable(parser: argparse._ActionsContainer, name: str) -> None:
    """Makes the command read the environment variable of the setting `name`."""
    parser.set_defaults(variables={*(parser.get_default("variables") or ()), name})


def reject(reason: str, **flags: object) -> None:
    """Raises InvalidSetting with `reason` if a flag is set (not None) that has no effect beside the others."""
    if name := next((name for name, value in flags.items() if value is not None), None):
        raise InvalidSetting(f"--{name.replace('_', '-')} has no effect here: {reason}")


def read(cls: type[C], arguments: Mapping[str, Any]) -> C:
    """Makes a `cls` from its defaults, the command's own (`defaults`), `--config`, environment variables and flags; the later ones win.

    Raises ValueError.
    """
    names = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    flags = {name: value for name, value in arguments.items() if name in names and value is not None}
    own = {**arguments.get("defaults", {}), **arguments.get("file_settings", {})}
    file = {name: value for name, value in own.items() if name in names}
    flags = {**from_environment(cls, arguments.get("variables", ())), **flags}
    try:
        return cls(**{**file, **flags})
    except ValueError as error:
        of_file = (place for name, place in arguments.get("file_places", {}).items() if name not in flags and _names_flag(error, name))
        raise ValueError(f"{place}: {error}" if (place := next(of_file, None)) else str(error)) from None


def _names_flag(error: ValueError, name: str) -> bool:
    return re.search(rf"--{name.replace('_', '-')}\b(?!-)", str(error)) is not None


def check_variables(arguments: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> None:
    """Raises ValueError for a `CHAIRLIFT_...` variable whose name is nearly one that the command heeds.

    Other unknown variables are ignored: Kubernetes, for one, sets CHAIRLIFT_SERVICE_HOST beside a service named chairlift.
    """
    variables = arguments.get("variables", ())
    fields = {field.name for cls in (EngineConfig, ServerConfig) for field in dataclasses.fields(cls)}
    settings = {ENV_PREFIX + name.upper() for name in fields.union(variables)}
    unknown = [name for name in environ if name.startswith(ENV_PREFIX) and name not in settings]
    for name in unknown:
        # The prefix is a part of what is compared, so names that differ in a word are less similar than this.
        if suggestion := did_you_mean(name, (ENV_PREFIX + one.upper() for one in variables), 0.9):
            raise ValueError(f"unknown variable {name}{suggestion}")


def _names(field: dataclasses.Field[Any]) -> tuple[str, ...]:
    """The flags of a field: its own, and those that other programs have for it."""
    return "--" + field.name.replace("_", "-"), *field.metadata.get("aliases", ())


class _HelpAll(argparse.Action):
    """Shows the help with the flags that `--help` hides."""

    def hide(self, action: argparse.Action) -> None:
        """Hides a flag from `--help`."""
        self._hidden = [*getattr(self, "_hidden", ()), (action, action.help)]
        action.help = argparse.SUPPRESS

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        for action, text in self._hidden:
            action.help = text
        parser.print_help()
        parser.exit()


class _Merge(argparse.Action):
    """Merges several values, which are dicts."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        merged = dict(getattr(namespace, self.dest, None) or {})
        for value in values:
            if twice := merged.keys() & value.keys():
                raise argparse.ArgumentError(self, f"{min(twice)} is named twice")
            merged |= value
        setattr(namespace, self.dest, merged)


def _argument(field: dataclasses.Field[Any]) -> dict[str, Any]:
    """The arguments of `add_argument` beside the name and help."""
    kind = str(field.type)
    if "bool" in kind:
        return {"action": argparse.BooleanOptionalAction}
    parse = values.reader(partial(parse_value, field.metadata, field.type))
    if "nargs" in field.metadata:
        return {"type": parse, "nargs": field.metadata["nargs"], "action": _Merge, "metavar": field.metadata["metavar"]}
    choices = field.metadata.get("choices")
    number = "N" if "int" in kind else "SECONDS" if "float" in kind else "TEXT"
    return {"type": parse, "metavar": "{" + ",".join(choices) + "}" if choices else field.metadata.get("metavar", number)}


def _help(field: dataclasses.Field[Any], text: str | None = None) -> str:
    shown = default_in_words(field)
    text = text or f"{field.metadata['help']}{f' (default: {shown})' if shown else ''}"
    return f"{text} [{ENV_PREFIX}{field.name.upper()}]".replace("%", "%%")


def add_sampling(parser: argparse.ArgumentParser, max_tokens: int | None) -> None:
    """Adds the flags of sampling; `max_tokens` is the default of `--max-tokens`, None for the rest of the context."""
    group = parser.add_argument_group("sampling")
    shown = "the rest of the context" if max_tokens is None else max_tokens
    count, fraction, own = values.whole(1, LARGEST_COUNT), values.number(0, 1), "the checkpoint's, else"
    group.add_argument("--max-tokens", type=count, default=max_tokens, metavar="N", help=f"most tokens to generate (default: {shown})")
    add_value(group, "--temperature", values.number(0, 100), "X", f"sampling temperature; 0 is greedy (default: {own} 1)")
    add_value(group, "--top-k", values.whole(-1, LARGEST_COUNT), "N", f"sample from the N most likely tokens (default: {own} all)")
    add_value(group, "--top-p", fraction, "X", f"sample from the most likely tokens of total probability X (default: {own} 1)")
    add_value(group, "--min-p", fraction, "X", f"drop tokens below X times the highest probability (default: {own} 0)")
    add_value(group, "--repetition-penalty", values.number(0.01, 100), "X", f"values above 1 penalize repeated tokens (default: {own} 1)")
    group.add_argument("--stop", action="append", metavar="TEXT", help="stop before this text; may be repeated")


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the engine, and `--log-level` with a quieter default than the server's."""
    add_fields(parser, EngineConfig)
    levels = ServerConfig.__dataclass_fields__["log_level"].metadata["choices"]
    parser.add_argument("--log-level", choices=levels, default="warning", help="how much to log (default: warning)")


def sampling_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `SamplingParams` that the flags set. Raises InvalidRequest for an invalid value."""
    # --seed is the engine's: with one seed for all requests, equal prompts would get equal outputs.
    names = {field.name for field in fields(SamplingParams)} - {"max_tokens", "seed"}
    settings = {name: value for name in names if (value := getattr(args, name, None)) is not None}
    settings["max_tokens"] = args.max_tokens
    SamplingParams(**settings)
    return settings
