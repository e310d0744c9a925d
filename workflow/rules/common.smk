# What the rules share: the checked config, the plan of shards, and where things lie.

import gc
import json
import os
import re
import shlex
import sys
from operator import attrgetter
from pathlib import Path

from tokamake import files
from tokamake.checkpoint.detect import list_files, open_any
from tokamake.checkpoint.native.folder import find as find_native
from tokamake.config.architecture import read_architecture
from tokamake.config.model import check_export_format, parse_export_format
from tokamake.config.runs import read_runs
from tokamake.config.training import INDEX_SETTINGS
from tokamake.data.mixture.weigh import set_path
from tokamake.data.indexed import job_batch
from tokamake.data.corpus.corpora import merge_tables, read_corpora
from tokamake.data.corpus.plan import make_plan
from tokamake.data.corpus.plan_file import read_plan, write_plan
from tokamake.data.corpus.sample_corpus import sample_names
from tokamake.data.tokenizers import open_tokenizer, tokenizer_files
from tokamake.errors import UserError
from tokamake.train.initial_checkpoint import open_start
from tokamake.validation import read_yaml

DATA = "results/data"
WEIGHTS = f"{DATA}/{{run}}.weights.txt"
PLAN_FILE = f"{DATA}/plan.json"

# Jobs find the commands of the environment that runs Snakemake, activated or not.
# Snakemake leaves out its strict mode where a prefix is set.
shell.prefix(f'set -euo pipefail; PATH={shlex.quote(str(Path(sys.executable).parent))}:"$PATH"; ')


def batch_file(stage, batch):
    """What a job of `tokenize` or `merge` writes when all that it makes is whole."""
    return f"{DATA}/batches/{stage}/{batch}.json"


def current_plan(shared, corpora, declared):
    """A plan that extends the one on file; in a job just that one, whatever files have come since."""
    written = read_plan(Path(PLAN_FILE)) if Path(PLAN_FILE).exists() else None
    if written and not workflow.is_main_process:
        return written
    sentences = shared.tokenize.split_sentences
    return make_plan(corpora, shared.plan, declared, previous=written, split_sentences=sentences)


def check_fim(run, where):
    """See that the tokenizer, which is to be trained, has the tokens of fill-in-the-middle."""
    fim = run.train.fim
    wanted = [fim.prefix, fim.suffix, fim.middle, *filter(None, [fim.split_token])]
    missing = [text for text in wanted if text not in run.tokenizer.special_tokens]
    if fim.rate and missing:
        raise UserError(
            f"{where}: train.fim: {', '.join(missing)}: not a token of the tokenizer that is to be "
            "trained; add it to tokenizer.special_tokens"
        )


def check_start(run, where):
    """See that the checkpoint fits the config, and that the model takes the sequences.

    Jobs need not look again: opening it imports torch.
    """
    model, train = run.model, run.train
    if model.checkpoint is None:
        architecture, told = read_architecture(model.architecture), model.architecture
    elif workflow.is_main_process:
        try:
            architecture = open_start(model.checkpoint, train, model.stated).architecture
        except UserError as error:
            raise UserError(f"{where}: model.checkpoint: {error}") from None
        told = model.checkpoint
    else:
        return
    check_forms(run.convert, architecture, where)
    check_tokenizer(run, architecture, where)
    if train.sequence_length > (longest := architecture.max_position_embeddings):
        raise UserError(
            f"{where}: train.sequence_length: {train.sequence_length}: more than the "
            f"{longest} max_position_embeddings of {told}; lower it"
        )


def check_forms(forms, architecture, where):
    """See that the model can be written in the forms that are asked for."""
    for form in forms:
        try:
            check_export_format(parse_export_format(form), architecture)
        except ValueError as error:
            raise UserError(f"{where}: convert: {form}: {error}") from None


def check_tokenizer(run, architecture, where):
    """See that the model to start from has an entry for each of the tokenizer's."""
    if run.model.checkpoint is None or not (path := run.tokenizer.path):
        return
    entries = open_tokenizer(path).vocab_size
    if entries > architecture.vocab_size:
        raise UserError(
            f"{where}: tokenizer.path: {path}: has {entries:,} entries, model.checkpoint "
            f"{run.model.checkpoint} has {architecture.vocab_size:,}; give the tokenizer that it was "
            "trained with"
        )


def find_tokenizer(runs):
    """Files of the tokenizer that is given, if one is: of the config, or else of the checkpoints."""
    found = {}
    for name, (run, where) in runs.items():
        if run.tokenizer.path:
            return tokenizer_files(run.tokenizer.path)[1]
        if run.model.checkpoint:
            found[name] = checkpoint_tokenizer(run.model.checkpoint, where)
    for name, paths in found.items():
        first, of_first = next(iter(found.items()))
        if [path.read_bytes() for path in paths] != [path.read_bytes() for path in of_first]:
            raise UserError(
                f"{runs[name].where}: model.checkpoint: {paths[0]} is another tokenizer than "
                f"{of_first[0]} of run {first}, and runs share their data; name one that fits all "
                "in tokenizer.path, or build the runs in folders of their own"
            )
    return next(iter(found.values()), None)


def checkpoint_tokenizer(start, where):
    """Files of a checkpoint's own tokenizer, which says what its tokens mean."""
    try:
        return tokenizer_files(start)[1]
    except UserError:
        raise UserError(
            f"{where}: tokenizer.path: missing: model.checkpoint {start} has no tokenizer "
            f"beside it; name the one that it was trained with{known_tokenizer(start)}"
        ) from None


def known_tokenizer(start):
    """What a checkpoint of one of our runs tells of its tokenizer, in words."""
    runs = sorted(file for file in list_files(start) if file.name == "run.yaml")
    found = read_yaml(runs[0], "name another checkpoint").get("tokenizer") if runs else None
    return f" ({found})" if found else ""


def check_sets(train, corpora, where):
    """See that there is something to train and to validate on, and how long."""
    missing = [corpus.corpus for corpus in corpora if corpus.trains and corpus.epochs is None]
    if train.num_samples is None and missing:
        raise UserError(
            f"{where}: train: no train_steps, train_samples or train_tokens, so the epochs of all "
            f"corpora say how long to train; {', '.join(missing)} has none, give it epochs or give "
            "train_steps"
        )
    named = {name for corpus in corpora for name in corpus.parts} - {"train", "test"}
    if train.evaluation_steps and not named and not float(train.split.split(",")[1]):
        raise UserError(
            f"{where}: train: split: {train.split!r}: nothing to validate on; give the second "
            "number a share, name a validation set in the column sets of the table of corpora, "
            "or set evaluation_steps to 0"
        )


def read_config():
    """Check the config and everything it names; decide shards and merged files."""
    given = workflow.overwrite_configfiles or ["config/config.yaml"]
    runs = read_runs(config, ", ".join(os.path.relpath(path) for path in given))
    shared = next(iter(runs.values())).config
    tables = {run.corpora: read_corpora(run.corpora) for run, _ in runs.values()}
    corpora = merge_tables(tables)
    declared = {
        f"results/raw/{corpus}/{name}": sample.file_bytes
        for corpus, sample in shared.sample_corpus.items()
        for name in sample_names(corpus, sample.num_files)
    }
    planned = current_plan(shared, corpora.values(), declared)
    for run, where in runs.values():
        check_start(run, where)
        check_sets(run.train, tables[run.corpora], where)
    tokenizer = find_tokenizer(runs)
    for run, where in runs.values() if tokenizer is None else ():
        check_fim(run, where)
    configs = {name: run.config for name, run in runs.items()}
    return configs, tables, corpora, declared, planned, tokenizer


# The plan is half a million objects in which a search for cycles takes a fifth of the time.
gc.disable()
try:
    RUNS, TABLES, CORPORA, DECLARED, PLAN, GIVEN_TOKENIZER = read_config()
except UserError as error:
    sys.exit("\n".join(f"tokamake: {line}" for line in str(error).splitlines()))
gc.freeze()
gc.enable()

CONFIG = next(iter(RUNS.values()))  # for what runs share
RUN = "results/{run}"
SETS = list(dict.fromkeys(name for c in CORPORA.values() for name in c.parts if name != "train"))
SHARDS = {shard.name: shard for shard in PLAN.shards}
MERGED = {pair.name: pair for pair in PLAN.merged}
TOKENIZE_BATCHES = {batch.name: batch.members for batch in PLAN.tokenize_batches}
MERGE_BATCHES = {batch.name: batch.members for batch in PLAN.merge_batches}
TOKENIZE_BATCH_OF = {shard: name for name in TOKENIZE_BATCHES for shard in TOKENIZE_BATCHES[name]}
MERGE_BATCH_OF = {
    shard: name
    for name in MERGE_BATCHES
    for pair in MERGE_BATCHES[name]
    for shard in MERGED[pair].shards
}
MERGE_FILES = [batch_file("merge", batch) for batch in MERGE_BATCHES]
TOKENIZER_FILES = [str(path) for path in GIVEN_TOKENIZER or []] or [
    "results/tokenizer/tokenizer.json",
    "results/tokenizer/tokenizer_config.json",
]


def options(section, only=None, leave_out=()):
    """Settings of a section as options of the stage, which has the same names; empty ones apart."""
    chosen = section.model_dump(
        mode="json", include=only and set(only), exclude=set(leave_out), exclude_none=True
    )
    named = {key.replace("_", "-"): value for key, value in chosen.items()}
    return [
        f"--{name}={value}" if not isinstance(value, bool) else f"--{'' if value else 'no-'}{name}"
        for name, value in named.items()
    ]


def setting(path):
    """A setting of the run, for `params`."""
    return lambda wildcards: attrgetter(path)(RUNS[wildcards.run])


def settings(section, leave_out=None):
    """A section of the config as JSON, for `params`; a function, since the text has braces."""

    def text(wildcards):
        run = RUNS[wildcards.run] if "run" in wildcards.keys() else CONFIG
        chosen = run.model_dump(mode="json")[section]
        return json.dumps({k: v for k, v in chosen.items() if k != leave_out}, sort_keys=True)

    return text


def redo_if_broken(path, folder, product):
    """Have a finished batch made again of which a pair has since been damaged or deleted.

    Snakemake looks at times of batch files only, and not at all at a missing one whose product is
    there. So the file is added to what the user could have named with --forcerun, which works in a
    dry run too. The job makes again what is broken, no more.
    """
    if not workflow.is_main_process or not (Path(path).exists() or Path(product).exists()):
        return
    if fault := job_batch.broken(Path(path), folder):
        if Path(path).exists():  # else it may be a new one
            print(f"tokamake: {fault}: it is made again", file=sys.stderr)
        workflow.dag.forcefiles.add(path)


def set_file(name):
    """Weighting file of a set that corpora name, beside that of the training."""
    return str(set_path(Path(WEIGHTS), name))


def held_out_split(wildcards):
    """The split, which must leave something to evaluate on, if no corpus is kept for that."""
    split = RUNS[wildcards.run].train.split
    if "test" not in SETS and not float(split.split(",")[2]):
        sys.exit(  # an exception would be told with its trace
            f"tokamake: train.split: {split!r}: nothing is held out to evaluate on; "
            "give the last number a share, or name a corpus with test in its column sets"
        )
    return split


def declared_files(paths):
    """Those of some raw files that a job makes.

    The others are no inputs to Snakemake, which 100,000 of them would slow down; params stand for
    their sizes and times.
    """
    return sorted(DECLARED.keys() & set(paths)) if DECLARED else []


def corpora_options(wildcards):
    """The run's table of corpora, and which others have data that it does not draw from."""
    table = RUNS[wildcards.run].corpora
    others = CORPORA.keys() - {corpus.corpus for corpus in TABLES[table]}
    return [f"--corpora={table}", *(f"--leave-out={corpus}" for corpus in sorted(others))]


def length_options(wildcards):
    """What `weigh` has to know of the training where epochs of corpora make it matter."""
    run = RUNS[wildcards.run]
    train = run.train
    if all(corpus.epochs is None for corpus in TABLES[run.corpora]):
        return []
    if train.num_samples is None:
        return [f"--split={train.split}"]
    tokens = train.num_samples * train.sequence_length
    return [f"--split={train.split}", f"--train-tokens={tokens}"]


def sample_options(wildcards):
    """How many samples `index` has to make."""
    run = RUNS[wildcards.run]
    train = run.train
    valid = f"--valid-samples={train.evaluation_steps * train.global_batch_size}"
    if train.num_samples is not None:
        return [f"--train-samples={train.num_samples}", valid]
    trained = [corpus for corpus in TABLES[run.corpora] if corpus.trains]
    return [*(f"--epochs={corpus.corpus}={corpus.epochs!r}" for corpus in trained), valid]


def corpus_of(batch):
    """Name of the corpus that a batch belongs to."""
    return batch.rpartition("-")[0]


def raw_inputs(wildcards):
    """Raw files that a job makes, of all shards of a batch."""
    shards = TOKENIZE_BATCHES[wildcards.batch]
    return declared_files(path for shard in shards for path in SHARDS[shard].files)


def tokenize_inputs(wildcards):
    """The same, once the batch has been looked at for damage."""
    product = batch_file("merge", MERGE_BATCH_OF[TOKENIZE_BATCHES[wildcards.batch][0]])
    redo_if_broken(batch_file("tokenize", wildcards.batch), f"{DATA}/shards", product)
    return raw_inputs(wildcards)


def corpus_hashes(wildcards):
    """Hashes of all batches of a corpus, in its order."""
    named = (batch for batch in TOKENIZE_BATCHES if corpus_of(batch) == wildcards.corpus)
    return [f"{DATA}/hashes/{batch}.rows" for batch in named]


def corpus_duplicates(wildcards):
    """Documents of a batch's corpus to leave out, if that is wanted."""
    corpus = corpus_of(wildcards.batch)
    return [f"{DATA}/duplicates/{corpus}.rows"] if CONFIG.tokenize.deduplicate else []


def merge_inputs(wildcards):
    """Batches that hold the shards of a batch of merged pairs."""
    product = f"{DATA}/metadata.json"
    redo_if_broken(batch_file("merge", wildcards.batch), f"{DATA}/merged", product)
    shards = (shard for pair in MERGE_BATCHES[wildcards.batch] for shard in MERGED[pair].shards)
    return [batch_file("tokenize", b) for b in sorted({TOKENIZE_BATCH_OF[s] for s in shards})]


def corpus_options(wildcards):
    """How the documents of a `tokenize` batch are read."""
    corpus = CORPORA[corpus_of(wildcards.batch)]
    keys = [f"--text-key={key}" for key in corpus.text_key.split(",")]
    return [*keys, f"--template={corpus.template}", f"--format={corpus.format}"]


def shards_stamp(wildcards):
    """Digest of the shards of a batch, and of their raw files' sizes and times."""
    shards = [SHARDS[name] for name in TOKENIZE_BATCHES[wildcards.batch]]
    return files.digest(str([(s.name, s.files, s.byte_range, s.stamp) for s in shards]))


def merged_stamp(wildcards):
    """Digest of what the pairs of a batch are merged from."""
    return files.digest([MERGED[name] for name in MERGE_BATCHES[wildcards.batch]])


onstart:
    # Written here and not by a job: all jobs of a run go by one plan. A dry run writes nothing.
    if workflow.is_main_process:
        write_plan(Path(PLAN_FILE), PLAN)


wildcard_constraints:
    batch=rf"(?:{'|'.join(map(re.escape, CORPORA))})-\d+",
    corpus="|".join(map(re.escape, CORPORA)),


def stated_architecture(wildcards):
    """File that the model's architecture is compared with, if one is named."""
    return [path for path in [RUNS[wildcards.run].model.stated] if path]


def form_options(wildcards, input):
    """What the name of a form says, as options of `convert`."""
    try:
        form = parse_export_format(wildcards.form)
    except ValueError as error:
        sys.exit(f"tokamake: {RUN.format(run=wildcards.run)}/convert/{wildcards.form}: {error}")
    sizes = [f"--{size.replace('_', '-')}={number}" for size, number in form.sizes.items()]
    dtype = [f"--dtype={form.dtype}"] if form.dtype else []
    tokenizer = [f"--tokenizer={input.tokenizer[0]}"] if form.format == "hf" else []
    return [f"--format={form.format}", *sizes, *dtype, *tokenizer]


def prompt_options(wildcards):
    """Texts that the run's model continues."""
    return [f"--prompts={prompt}" for prompt in RUNS[wildcards.run].generate.prompts]
