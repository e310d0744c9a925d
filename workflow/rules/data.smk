# Raw text to weighted, merged pairs of tokens and the sample index of a run.

if CONFIG.sample_corpus:

    rule sample_corpus:
        "Harvest small corpora of real text from the Python standard library."
        output:
            list(DECLARED),
        log:
            "logs/sample_corpus.log",
        benchmark:
            "results/benchmarks/sample_corpus.tsv"
        params:
            settings=json.dumps(
                {name: sample.model_dump() for name, sample in CONFIG.sample_corpus.items()}
            ),
        shell:
            "tokamake sample-corpus --settings {params.settings:q} --output results/raw > {log} 2>&1"


if CONFIG.tokenizer.path is None:

    rule train_tokenizer:
        "Train a byte-level BPE tokenizer on the raw corpora."
        input:
            raw=RAW,
            corpora=CONFIG.corpora,
        output:
            TOKENIZER_FILES,
        log:
            "logs/train_tokenizer.log",
        benchmark:
            "results/benchmarks/train_tokenizer.tsv"
        params:
            vocab_size=CONFIG.tokenizer.vocab_size,
            train_bytes=CONFIG.tokenizer.train_bytes,
        shell:
            "tokamake train-tokenizer --corpora {input.corpora} --vocab-size {params.vocab_size}"
            " --train-bytes {params.train_bytes} --output {TOKENIZER} > {log} 2>&1"


rule plan:
    "Write down which raw files make a shard and which shards a merged file."
    output:
        PLAN_FILE,
    log:
        "logs/plan.log",
    benchmark:
        "results/benchmarks/plan.tsv"
    priority: 100  # before anything is made, so that files added meanwhile move nothing
    params:
        settings=settings("plan"),
        declared=[f"--declared={path}={size}" for path, size in DECLARED.items()],
        # Plans of the same shards are the same; params change, and with them the file.
        shards=[(s.name, *s.files, s.byte_range) for s in PLAN.shards],
    shell:
        "tokamake plan --corpora {CONFIG.corpora} --settings {params.settings:q}"
        " {params.declared:q} --output {output} > {log} 2>&1"


def shard_files(wildcards):
    """Raw files of a shard."""
    name = f"{wildcards.corpus}/{wildcards.number}"
    redo_if_broken(f"{DATA}/shards/{name}", f"{DATA}/merged/{MERGED_OF[name]}")
    return SHARDS[name].files


rule tokenize:
    "Turn the raw files of one shard into a .bin/.idx pair of tokens."
    input:
        raw=shard_files,
        tokenizer=TOKENIZER_FILES,
    output:
        pair_files(f"{DATA}/shards/{{corpus}}/{{number}}"),
    log:
        "logs/tokenize/{corpus}-{number}.log",
    benchmark:
        "results/benchmarks/tokenize/{corpus}-{number}.tsv"
    params:
        text_key=lambda wildcards: CORPORA[wildcards.corpus].text_key,
        append_eod="--append-eod" if CONFIG.tokenize.append_eod else "--no-append-eod",
        byte_range=lambda wildcards: SHARDS[f"{wildcards.corpus}/{wildcards.number}"].byte_range,
    threads: 1
    shell:
        "tokamake tokenize {input.raw:q} --output {DATA}/shards/{wildcards.corpus}/{wildcards.number}"
        " --tokenizer {TOKENIZER} --text-key {params.text_key:q} {params.append_eod}"
        " --byte-range={params.byte_range:q} --workers {threads} > {log} 2>&1"


def merged_shards(wildcards):
    """Files of the shards of a merged pair."""
    redo_if_broken(f"{DATA}/merged/{wildcards.pair}", f"{DATA}/metadata/{wildcards.pair}")
    prefixes = [f"{DATA}/shards/{name}" for name in MERGED[wildcards.pair].shards]
    return [path for prefix in prefixes for path in pair_files(prefix)]


rule merge:
    "Put the shards of one merged file together, verifying each."
    input:
        merged_shards,
    output:
        pair_files(f"{DATA}/merged/{{pair}}"),
    log:
        "logs/merge/{pair}.log",
    benchmark:
        "results/benchmarks/merge/{pair}.tsv"
    params:
        corpus=lambda wildcards: MERGED[wildcards.pair].corpus,
        prefixes=lambda wildcards, input: [path[:-4] for path in input[::3]],
    shell:
        "tokamake merge {params.prefixes:q} --output {DATA}/merged/{wildcards.pair}"
        " --corpus {params.corpus} > {log} 2>&1"


rule describe:
    "Write the metadata of every merged file, and of all of them."
    input:
        merged=[path for name in MERGED for path in pair_files(f"{DATA}/merged/{name}")],
        plan=PLAN_FILE,
    output:
        f"{DATA}/metadata.json",
        [f"{DATA}/metadata/{name}.json" for name in MERGED],
    log:
        "logs/describe.log",
    benchmark:
        "results/benchmarks/describe.tsv"
    params:
        prefixes=[f"{DATA}/merged/{name}" for name in MERGED],
    shell:
        "tokamake describe {params.prefixes:q} --output {output[0]} > {log} 2>&1"


rule weigh:
    "Write the weighting file: weight, prefix and corpus of every merged file."
    input:
        metadata=f"{DATA}/metadata.json",
        corpora=CONFIG.corpora,
    output:
        f"{DATA}/weights.txt",
    log:
        "logs/weigh.log",
    benchmark:
        "results/benchmarks/weigh.tsv"
    shell:
        "tokamake weigh --corpora {input.corpora} --metadata {input.metadata} --output {output}"
        " > {log} 2>&1"


rule index:
    "Build the run's document, sample and shuffle indexes and its blend."
    input:
        weights=f"{DATA}/weights.txt",
        merged=[path for name in MERGED for path in pair_files(f"{DATA}/merged/{name}")],
    output:
        f"{RUN}/index/index.json",
    log:
        "logs/index.log",
    benchmark:
        "results/benchmarks/index.tsv"
    params:
        sequence_length=CONFIG.train.sequence_length,
        train_samples=CONFIG.train.train_steps * CONFIG.train.global_batch_size,
        valid_samples=CONFIG.train.evaluation_steps * CONFIG.train.global_batch_size,
        split=CONFIG.train.split,
        seed=CONFIG.seed,
    shell:
        "tokamake index --weights {input.weights} --data-root {DATA} --output {RUN}/index"
        " --sequence-length {params.sequence_length} --train-samples {params.train_samples}"
        " --valid-samples {params.valid_samples} --split {params.split} --seed {params.seed}"
        " > {log} 2>&1"


rule data:
    "Build all data: tokenized, merged, described and weighted."
    input:
        rules.describe.output,
        rules.weigh.output,
