"""The tool `from_megatron_args`: a config from a command line of Megatron-LM or Megatron-DeepSpeed.

`megatron_flags.tsv` lists the flags. Their settings are paths of the config, or, after `model.`,
Megatron's arguments of the model; `=` gives a fixed value, `|` the values that have another name,
`[]` makes a list.
`deepspeed.` begins keys of DeepSpeed's JSON file.
"""

import ast
import functools
import math
import os
import re
import shlex
from argparse import Namespace
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokamake import files, plugins
from tokamake.config.objective import objective_of
from tokamake.errors import UserError
from tokamake.runtime.console import counted

_OF_ALL = ("name", "learning_rate", "start_weight_decay", "end_weight_decay")
_MODELS = "models/*/megatron"
_LIST = "[]"
_NEEDED = ("num_layers", "hidden_size", "num_attention_heads")


def from_megatron_args(arguments: list[str], /, *, output: Path = Path("megatron.yaml")) -> None:
    """Turn a command line of Megatron-LM or Megatron-DeepSpeed into a config.

    The config begins with comments that name each flag that it does not carry over, and why. Beside
    it are the shape of the model, NAME.model.yaml, and the list of --data-path, NAME.weights.txt.
    Missing flags have Megatron's defaults.

    Args:
        arguments: the command line, as one quoted text, as words after `--`, or as a file. A
            launcher before the script is left out.
        output: file to write.
    """
    import yaml

    from tokamake.config.root import Config
    from tokamake.config_files import validate

    program, flags = read_flags(arguments)
    paths = flags.pop("data-path", [])
    settings, model, notes = _settings(flags)
    base = "megatron" if files.is_stream(output) else str(output.with_suffix(""))
    written: dict[str, str] = {}
    if paths:
        has_weights = not isinstance(_parsed(paths[0]), str)
        weights, prefixes = (
            (paths[::2], paths[1::2]) if has_weights else (["1"] * len(paths), paths)
        )
        pairs = zip(weights, prefixes, strict=False)
        # Prefixes of a list are relative to its folder; `Path` keeps absolute ones.
        folder = os.path.relpath(Path.cwd(), Path(base).parent)
        written["weights.txt"] = "".join(
            f"{weight} {Path(folder, prefix)}\n" for weight, prefix in pairs
        )
        settings["weights"] = f"{base}.weights.txt"
    if objective := objective_of(program):
        of_sentences = {"split_sentences": True, "append_eod": False}
        settings |= {"train.objective": objective, "tokenize": of_sentences}
    if "num_layers" in model or "model.checkpoint" not in settings:
        architecture = _architecture(program, model, flags=flags)
        written["model.yaml"] = yaml.safe_dump(architecture, sort_keys=False)
        settings["model.architecture"] = f"{base}.model.yaml"
    values: dict[str, Any] = {"run": "megatron", "data_set": "megatron"}
    for path, value in settings.items():
        *sections, name = path.split(".")
        functools.reduce(lambda into, each: into.setdefault(each, {}), sections, values)[name] = (
            value
        )
    validate(Config, values, "config of these flags")
    for name, text in written.items():
        files.write_text(Path(f"{base}.{name}"), text)
    notes = [re.sub(r"\[(.+?)\]\(.+?\)", r"\1", " ".join(f"# {note}".split())) for note in notes]
    head = f"# From a command line of Megatron.{' Not carried over:' * bool(notes)}"
    config = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    files.write_text(output, "\n".join([head, *notes, config]))
    if not files.is_stream(output):
        print(f"{output}: {counted(len(notes), 'flag')} not carried over; see its first lines")


def flag_table() -> list[list[str]]:
    """Rows of all flags: names, settings, Megatron's default if it differs, remark."""
    text = Path(__file__).with_name("megatron_flags.tsv").read_text(encoding="utf-8")
    return [line.split("\t") for line in text.splitlines()[1:]]


def read_flags(arguments: list[str]) -> tuple[str, dict[str, list[str]]]:
    """Return the script and the values of each flag; as in Megatron, the last of several counts."""
    words = arguments
    if len(words) == 1:
        text = words[0]
        if os.path.isfile(text):  # noqa: PTH113  # Path.is_file fails for long texts
            text = Path(text).read_text(encoding="utf-8")
        try:
            words = shlex.split(text.replace("\\\n", " "), comments=True)
        except ValueError as error:
            raise UserError(f"command line: {error}; quote it as for a shell") from None
    if variable := re.search(r"\$[{(]?\w*", " ".join(words)):
        raise UserError(
            f"{variable[0]}: a variable of the shell; write its value, or put echo before the "
            "command in the script, run it, and give what it prints"
        )
    start = next((place + 1 for place, word in enumerate(words) if word.endswith(".py")), 0)
    flags: dict[str, list[str]] = {}
    for word in words[start:]:
        if re.match(r"\d?[|&;<>]", word):  # what follows is the shell's
            break
        if word.startswith("--"):
            name, has_value, value = word[2:].partition("=")
            values = flags[name.replace("_", "-")] = [value] if has_value else []
        elif not flags:
            raise UserError(
                f"{word}: no file, and no flag of Megatron; begin with its script, or with a flag"
            )
        else:
            values.append(word)
    if not flags:
        raise UserError("command line: has no flags; give the flags of Megatron's script")
    script = Path(words[start - 1]).stem if start else ""
    return script, _of_deepspeed(flags.get("deepspeed-config", [])) | flags


def _of_deepspeed(paths: list[str]) -> dict[str, list[str]]:
    """Settings of DeepSpeed's JSON file as flags."""
    from tokamake.config.fields import dotted

    for path in paths:
        settings = dotted(
            files.read_json(Path(path), "give DeepSpeed's file, or leave the flag out")
        )
        return {
            f"deepspeed.{name}".replace("_", "-"): [] if value is True else [str(value)]
            for name, value in settings.items()
            if value not in (None, False, "auto")
        }
    return {}


def _settings(flags: dict[str, list[str]]) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Settings by path, Megatron's arguments of the model, and lines about arguments left out."""
    settings, notes, unknown = _derived(flags), [], {**flags}
    for names, targets, default, reason in flag_table():
        given = [name for name in flags if name in names.replace("_", "-").split()]
        if not given and not default:
            continue
        values = flags[given[-1]] if given else [default]
        for target in targets.split():
            path, value = _value(target, values, flag=names.split()[0])
            is_used = _is_used(path, settings)
            settings |= {path: value} if is_used else {}
            reason = "" if is_used else "without effect beside the other settings"
        for name in given:
            del unknown[name]
            if reason:
                notes.append(f"--{' '.join([name, *flags[name]])}: {reason}")
    notes += [
        f"--{' '.join([name, *values])}: not known"
        for name, values in unknown.items()
        if not name.startswith("deepspeed.")  # train.deepspeed takes them as they are
    ]
    if "model.checkpoint" in settings:
        settings.setdefault("train.finetune", False)
    model = {path[5:]: settings.pop(path) for path in [*settings] if path.startswith("args.")}
    return settings, model, notes


def _value(target: str, values: list[str], *, flag: str) -> tuple[str, Any]:
    target, *names = target.split("|")
    path, is_fixed, fixed = target.partition("=")
    if not (texts := [fixed] if is_fixed else values):
        raise UserError(f"--{flag}: has no value; add it")
    renamed = dict(name.split(":") for name in names)
    parsed = [_parsed(renamed.get(text, text)) for text in texts]
    if path.endswith(_LIST):
        return path.removesuffix(_LIST), parsed
    return path, parsed[0] if len(parsed) == 1 else parsed


def _parsed(text: str) -> Any:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    if re.fullmatch(r"[\d\[\](),+* ]+", text):
        with suppress(SyntaxError, TypeError):
            return _pattern(ast.parse(text, mode="eval").body)
    return {"true": True, "false": False}.get(text, text)


def _pattern(node: ast.expr) -> Any:
    """Value of a list such as `([0]*3+[1]*58)`: Megatron's patterns of layers are Python."""
    match node:
        case ast.Constant(value=int() as number):
            return number
        case ast.List(elts=elements):
            return [_pattern(each) for each in elements]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _pattern(left) + _pattern(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _pattern(left) * _pattern(right)
    raise TypeError(node)


def _derived(flags: dict[str, list[str]]) -> dict[str, Any]:
    """Settings that follow from several flags; flags that have no meaning then are removed."""
    parsed = {name: _parsed(values[0]) for name, values in flags.items() if values}
    number = {
        name: value
        for name, value in parsed.items()
        if not isinstance(value, str | list) and math.isfinite(value)
    }
    settings: dict[str, Any] = {}
    if flags.keys() >= {"bf16", "fp16"}:
        raise UserError("--bf16 and --fp16: both are given, which Megatron refuses; give one")
    if number.get("loss-scale") == 0:
        del flags["loss-scale"]
    if flags.get("moe-router-load-balancing-type") == ["none"]:
        flags["moe-aux-loss-coeff"] = ["0"]
    if flags.get("load") == flags.get("save", ()):
        del flags["load"]
    if "train-tokens" in flags and flags.keys() & {"train-iters", "train-samples"}:
        del flags["train-tokens"]  # Megatron-DeepSpeed's scripts derive the other lengths
    if "deepspeed.train-batch-size" not in flags:
        flags.setdefault("global-batch-size", flags.get("micro-batch-size", ["1"]))
    for unit, setting in (("iters", "steps"), ("samples", "samples")):
        total = number.get(f"lr-decay-{unit}", number.get(f"train-{unit}"))
        if total and (share := number.get("lr-warmup-fraction")):
            settings[f"train.schedule.warmup_{setting}"] = int(total * share)
            del flags["lr-warmup-fraction"]
            break
    if virtual := number.get("num-layers-per-virtual-pipeline-stage"):
        stages = number.get("num-layers", 0) // (number.get("pipeline-model-parallel-size") or 1)
        del flags["num-layers-per-virtual-pipeline-stage"]
        settings["train.parallel.virtual_pipeline_size"] = stages // virtual
        settings["train.parallel.pipeline_schedule"] = "interleaved_1f1b"
    if flags.get("tokenizer-type") == ["NullTokenizer"] and (size := number.get("vocab-size")):
        values = {"kind": "ids", "vocab_size": size + 1, "eod": size}
        settings |= {f"tokenizer.{name}": value for name, value in values.items()}
        del flags["tokenizer-type"], flags["vocab-size"]
    return settings


def _is_used(path: str, settings: Mapping[str, Any]) -> bool:
    """Whether a setting has an effect, given the settings of earlier rows."""
    from tokamake.config.optimization import OptimizerSettings
    from tokamake.config.plugin_settings import PlugInSettings
    from tokamake.config.schedule import ScheduleSettings

    section, _, name = path.rpartition(".")
    if section == "train.loss_scaling":
        is_static = settings.get("train.loss_scaling.static")
        of_static = name in ("initial_scale", "static")
        return settings.get("train.precision") == "fp16" and (of_static or not is_static)
    if section == "train.router":
        return "args.num_experts" in settings
    if path in ("train.finetune", "train.load_optimizer"):
        is_continued = path == "train.finetune" or not settings.get("train.finetune")
        return "model.checkpoint" in settings and is_continued
    kinds: dict[str, type[PlugInSettings]] = {
        "train.optimizer": OptimizerSettings,
        "train.schedule": ScheduleSettings,
    }
    if section not in kinds or name in _OF_ALL:
        return True
    kind = kinds[section]
    known = plugins.constant(kind.folder, settings[f"{section}.name"], "SETTINGS")
    quantity = kind.quantities.get
    return quantity(name, name) in {quantity(each, each) for each in known}


def _architecture(
    program: str, model: dict[str, Any], *, flags: Mapping[str, list[str]]
) -> dict[str, Any]:
    """Fields of the architecture, by the code that reads Megatron's checkpoints."""
    from tokamake.checkpoint.megatron_model.args_reader import architecture_of

    for name in _NEEDED:
        if not isinstance(model.get(name), int):
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{flag}: {model.get(name, 'missing')}: not a number; give one")
    width = model["hidden_size"]
    gated = width * 8 // 3 // 64 * 64  # Megatron's default with --swiglu
    defaults = {
        "add_bias_linear": True,
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "max_position_embeddings": _parsed(flags.get("seq-length", ["2048"])[0]),
        "ffn_hidden_size": gated if model.get("swiglu") else 4 * width,
    }
    family = next((name for name in plugins.names(_MODELS) if program in _programs(name)), None)
    tensors = plugins.constant(_MODELS, family, "TENSORS") if family else ()
    args, where = Namespace(**defaults | model), Path("flags")
    shape = architecture_of(args, where, padded_vocab_size=1, names=frozenset(tensors))
    return shape.model_dump(exclude={"vocab_size"}, exclude_none=True)


def _programs(family: str) -> tuple[str, ...]:
    """Scripts of Megatron that train no other family."""
    programs: tuple[str, ...] = plugins.constant(_MODELS, family, "PROGRAMS", default=())
    return programs
