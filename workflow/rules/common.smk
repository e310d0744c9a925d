# What the rules share: the checked config, the plan of shards, and where things lie.

import json
import os
import re
import shlex
import sys
from pathlib import Path

from tokamake.config import Config, read_architecture, read_corpora
from tokamake.data import pairs
from tokamake.data.plan import make_plan, raw_files, read_plan
from tokamake.data.sample_corpus import sample_names
from tokamake.data.tokenizers import tokenizer_files
from tokamake.errors import UserError
from tokamake.validation import validate

DATA = "results/data"
PLAN_FILE = f"{DATA}/plan.json"

# Jobs find the commands of the environment that runs Snakemake, activated or not.
# Snakemake leaves out its strict mode where a prefix is set.
shell.prefix(f'set -euo pipefail; PATH={shlex.quote(str(Path(sys.executable).parent))}:"$PATH"; ')


def read_config():
    """Check the config and everything it names; decide shards and merged files."""
    given = workflow.overwrite_configfiles or ["config/config.yaml"]
    source = ", ".join(os.path.relpath(path) for path in given)
    checked = validate(Config, config, source)
    corpora = read_corpora(checked.corpora)
    declared = {
        f"results/raw/{corpus}/{name}": sample.file_bytes
        for corpus, sample in checked.sample_corpus.items()
        for name in sample_names(corpus, sample.num_files)
    }
    planned = make_plan(corpora, checked.plan, declared, previous=read_plan(Path(PLAN_FILE)))
    if checked.model.checkpoint is None:
        longest = read_architecture(checked.model.architecture).max_position_embeddings
        if checked.train.sequence_length > longest:
            raise UserError(
                f"{source}: train.sequence_length: {checked.train.sequence_length}: more than the "
                f"{longest} max_position_embeddings of {checked.model.architecture}; lower it"
            )
    elif not (checked.model.checkpoint / "config.json").is_file():
        raise UserError(
            f"{source}: model.checkpoint: {checked.model.checkpoint}: no config.json there; "
            "name the folder of a Hugging Face checkpoint"
        )
    # A checkpoint's tokens mean what its own tokenizer says.
    tokenizer = checked.tokenizer.path or checked.model.checkpoint
    found = tokenizer_files(tokenizer)[1] if tokenizer else None
    return checked, {corpus.corpus: corpus for corpus in corpora}, declared, planned, found


try:
    CONFIG, CORPORA, DECLARED, PLAN, GIVEN_TOKENIZER = read_config()
except UserError as error:
    sys.exit("\n".join(f"tokamake: {line}" for line in str(error).splitlines()))

RUN = f"results/{CONFIG.run}"
SHARDS = {shard.name: shard for shard in PLAN.shards}
MERGED = {pair.name: pair for pair in PLAN.merged}
MERGED_OF = {shard: pair.name for pair in PLAN.merged for shard in pair.shards}
TEXT_KEYS = [corpus.text_key for corpus in CORPORA.values()]
if len(set(TEXT_KEYS)) == 1:
    TEXT_KEYS = TEXT_KEYS[:1]
else:  # one for each file that the tokenizer is trained on
    keys_of = {}
    for corpus in CORPORA.values():
        for path in raw_files(corpus, DECLARED):
            keys_of.setdefault(path, []).append(corpus.text_key)
    TEXT_KEYS = [keys_of[path].pop(0) for path in PLAN.tokenizer_files]
TOKENIZER_FILES = [str(path) for path in GIVEN_TOKENIZER or []] or [
    "results/tokenizer/tokenizer.json",
    "results/tokenizer/tokenizer_config.json",
]


def pair_files(prefix):
    """The three files of a pair."""
    return [f"{prefix}{suffix}" for suffix in (".bin", ".idx", ".json")]


def settings(section):
    """A section of the config as JSON, for `params`; a function, since the text has braces."""
    text = json.dumps(CONFIG.model_dump(mode="json")[section], sort_keys=True)
    return lambda wildcards: text


def redo_if_broken(prefix, product):
    """Have a finished pair made again that has since been damaged or deleted.

    Snakemake looks at times only, and not at all at a missing file whose product is there. So the
    pair is added to what the user could have named with --forcerun, which works in a dry run too.
    """
    once_finished = any(Path(f"{path}.json").exists() for path in (prefix, product))
    fault = pairs.broken(Path(prefix)) if once_finished and workflow.is_main_process else None
    if fault:
        print(f"tokamake: {fault}: it is made again", file=sys.stderr)
        workflow.dag.forcefiles.add(f"{prefix}.bin")


def held_out_split(wildcards):
    """The split, which must leave something to evaluate on."""
    if not float(CONFIG.train.split.split(",")[2]):
        raise WorkflowError(
            f"tokamake: train.split: {CONFIG.train.split!r}: nothing is held out to evaluate on; "
            "give the last number a share"
        )
    return CONFIG.train.split


def shard_files(wildcards):
    """Raw files of a shard."""
    name = f"{wildcards.corpus}/{wildcards.number}"
    redo_if_broken(f"{DATA}/shards/{name}", f"{DATA}/merged/{MERGED_OF[name]}")
    return SHARDS[name].files


def merged_shards(wildcards):
    """Files of the shards of a merged pair."""
    redo_if_broken(f"{DATA}/merged/{wildcards.pair}", f"{DATA}/metadata/{wildcards.pair}")
    prefixes = [f"{DATA}/shards/{name}" for name in MERGED[wildcards.pair].shards]
    return [path for prefix in prefixes for path in pair_files(prefix)]


wildcard_constraints:
    number=r"\d+",
    corpus="|".join(map(re.escape, CORPORA)),
    pair="|".join(map(re.escape, MERGED)),
