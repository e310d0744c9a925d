"""Write the pages of docs/reference that are made from code: `python docs/generate.py`."""

import re
from pathlib import Path
from typing import Any

from tokamake import cli, commands, plugins
from tokamake.checkpoint.from_megatron_args import flag_table
from tokamake.config.optimization import optimizer_facts
from tokamake.config.root import Config

REFERENCE = Path(__file__).parent / "reference"
FLAGS, HEAD = Path(__file__).parent / "howto/existing-datasets.md", "| Megatron | tokamake |"
OPTIMIZERS = REFERENCE / "optimizers.md"
OPTIMIZER_HEAD = "| Optimizer | Method | Settings | Most bytes per parameter | Update | ZeRO |"
SCHEDULE_HEAD = "| Schedule | Rate after warm-up | Settings |"


def commands_page() -> str:
    """Options of all subcommands, from their functions' signatures and docstrings."""
    lines = [
        "# Commands",
        "",
        "Stages are subcommands that rules of the workflow call. Tools are for people.",
        "",
        "If a command writes one file, `--output -` writes it to standard output, and what the",
        "command prints goes to standard error. `--output` follows links, and writes to devices",
        "and pipes directly.",
    ]
    for group in commands.GROUPS:
        lines += ["", f"## {group}"]
        for name in [*commands.STAGES.get(group, {}), *commands.TOOLS.get(group, {})]:
            app = cli.make_app(name)[name]
            text = app.generate_docs(output_format="markdown", heading_level=3)
            # The command line has no --empty-OPTION, although its parser's pages list them.
            text = re.sub(r", --empty-[a-z-]+", "", text)
            text = text.replace("```console\n", "```console\ntokamake ")
            lines += ["", text.replace("\n\n\n", "\n\n").strip()]
            example = f"tokamake {name} {commands.COMMANDS[name].example}"
            lines += ["", "**Example**", "", "```sh", example, "```"]
    return "\n".join(lines) + "\n"


def flags_table() -> str:
    """Megatron's flags with their settings, as the guide to existing datasets has them."""
    lines = [HEAD, "|---|---|"]
    for names, targets, _, remark in flag_table():
        paths = [re.split(r"[=|[]", target)[0] for target in targets.split()]
        shown = dict.fromkeys(
            "`model.architecture`" if path.startswith("args.") else f"`{path}`" for path in paths
        )
        flags = ", ".join(
            f"`--{flag}`" for flag in names.split() if not flag.startswith("deepspeed.")
        )
        settings = ", ".join(shown)
        meaning = f"{settings}; {remark}" if settings and remark else settings or remark
        lines.append(f"| {flags} | {meaning} |")
    return "\n".join(lines) + "\n"


def optimizer_table() -> str:
    """The optimizers by the docstrings and literals of their files."""
    lines = [OPTIMIZER_HEAD, "|---|---|---|---|---|---|"]
    for name in plugins.names("optim"):
        facts = optimizer_facts(name)
        num_states = [*facts.state.values()].count("like_parameter")
        zero = "0 to 3" if facts.elementwise else "0"
        if not facts.flat_buffers or facts.extra_pass:
            zero = "no"
        cells = [
            *_plug_in_cells("optim", name),
            f"{num_states * facts.state_bytes:.3g}",
            "by element" if facts.elementwise else "by whole parameter",
            zero,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def schedule_table() -> str:
    """The schedules by the docstrings and settings of their files."""
    lines = [SCHEDULE_HEAD, "|---|---|---|"]
    for name in plugins.names("schedules"):
        lines.append(f"| {' | '.join(_plug_in_cells('schedules', name))} |")
    return "\n".join(lines) + "\n"


def _plug_in_cells(kind: str, name: str) -> list[str]:
    """Name of a plug-in, first line of its docstring, and its settings with their defaults."""
    meaning = (plugins.load(kind, name).__doc__ or "").strip().splitlines()[0].removesuffix(".")
    meaning = re.sub(r"arXiv (\d{4}\.\d{4,5})", r"[\1](https://arxiv.org/abs/\1)", meaning)
    defaults: list[str] = []
    for key, value in plugins.constant(kind, name, "SETTINGS").items():
        default = value["default"] if isinstance(value, dict) else value
        default = default[0] if isinstance(default, tuple) else default
        defaults.append(f"`{key}` {default}")
    return [f"`{name}`", meaning, ", ".join(defaults)]


def with_tables(text: str, *tables: str) -> str:
    """A page whose tables are written again; a table begins with the same line as before."""
    for table in tables:
        before, _, after = text.partition(table.splitlines()[0])
        _, gap, rest = after.partition("\n\n")
        text = before + table + gap[1:] + rest
    return text


def config_page() -> str:
    """Keys of config.yaml with their types, defaults and meaning, from its JSON schema."""
    schema = Config.model_json_schema()
    lines = [
        "# Config",
        "",
        "Keys of `config/config.yaml`, or of the file that `--configfile` names instead. Every key",
        "has a default. An unknown key is an error that names the nearest valid key.",
    ]
    lines += _section(schema, schema, title="")
    return "\n".join(lines) + "\n"


def _section(schema: dict[str, Any], root: dict[str, Any], *, title: str) -> list[str]:
    """A table of the keys of a section, then the sections in it."""
    lines = ["", f"## {title}" if title else "## Top level", ""]
    if title and schema.get("description"):
        lines += [" ".join(schema["description"].split()), ""]
    lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
    sections = []
    for name, field in schema["properties"].items():
        target = _resolve(field, root)
        meaning = " ".join(field.get("description", "").split()).replace("|", "\\|")
        if "properties" in target:
            path = f"{title}.{name}" if title else name
            sections.append((path, target))
            link = path.replace(".", "").lower()
            lines.append(f"| `{name}` | [section](#{link}) | | {meaning} |")
            continue
        default = "" if "default" not in field else f"`{_yaml(field['default'])}`"
        lines.append(f"| `{name}` | {_type(field, root)} | {default} | {meaning} |")
    for path, target in sections:
        lines += _section(target, root, title=path)
    return lines


def _resolve(field: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    """The section that a field refers to, if it is one."""
    options = [field, *field.get("allOf", []), *field.get("anyOf", [])]
    for option in options:
        if "$ref" in option:
            definition: dict[str, Any] = root["$defs"][option["$ref"].rpartition("/")[2]]
            return definition
    return field


def _type(field: dict[str, Any], root: dict[str, Any]) -> str:
    """Type of a key in words, or its choices."""
    if "anyOf" in field:
        names = [_type(option, root) for option in field["anyOf"]]
        return " or ".join(dict.fromkeys(name for name in names if name != "empty"))
    if "enum" in field:
        return ", ".join(f"`{choice}`" for choice in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    if field.get("type") == "array":
        if items := field.get("prefixItems"):
            types = dict.fromkeys(_type(item, root) for item in items)
            return f"list of {len(items)}: {' or '.join(types)}"
        return f"list of {_type(field.get('items', {}), root)}"
    if "$ref" in field:
        return "section"
    names = {
        "integer": "integer", "number": "number", "string": "text", "boolean": "true, false",
        "null": "empty", "object": "mapping",
    }  # fmt: skip
    kind = names.get(str(field.get("type")), "any")
    return "path" if field.get("format") == "path" else kind


def _yaml(value: Any) -> str:
    """A default as YAML has it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


PAGES = {"commands.md": commands_page, "config.md": config_page}

if __name__ == "__main__":
    REFERENCE.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (REFERENCE / name).write_text(page(), encoding="utf-8")
    tables = {FLAGS: [flags_table()], OPTIMIZERS: [optimizer_table(), schedule_table()]}
    for path, new in tables.items():
        path.write_text(with_tables(path.read_text(encoding="utf-8"), *new), encoding="utf-8")
