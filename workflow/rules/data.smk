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
        conda:
            "../envs/tokamake.yaml"
        params:
            settings=settings("sample_corpus"),
        shell:
            "tokamake sample-corpus --settings {params.settings:q} --output results/raw > {log} 2>&1"


if GIVEN_TOKENIZER is None:

    rule train_tokenizer:
        "Train a byte-level BPE tokenizer on the raw corpora."
        input:
            PLAN.tokenizer_files,
        output:
            TOKENIZER_FILES,
        log:
            "logs/train_tokenizer.log",
        benchmark:
            "results/benchmarks/train_tokenizer.tsv"
        conda:
            "../envs/tokamake.yaml"
        params:
            text_keys=lambda wildcards: [f"--text-keys={key}" for key in TEXT_KEYS],
            vocab_size=CONFIG.tokenizer.vocab_size,
            train_bytes=CONFIG.tokenizer.train_bytes,
            folder=subpath(output[0], parent=True),
        shell:
            "tokamake train-tokenizer {input:q} {params.text_keys:q} --vocab-size {params.vocab_size}"
            " --train-bytes {params.train_bytes} --output {params.folder} > {log} 2>&1"


rule plan:
    "Write down which raw files make a shard and which shards a merged file."
    output:
        update(PLAN_FILE),  # not deleted beforehand: the earlier plan is extended
    log:
        "logs/plan.log",
    benchmark:
        "results/benchmarks/plan.tsv"
    priority: 100  # before anything is made, so that files added meanwhile move nothing
    conda:
        "../envs/tokamake.yaml"
    params:
        corpora=str(CONFIG.corpora),
        settings=settings("plan"),
        declared=[f"--declared={path}={size}" for path, size in DECLARED.items()],
        # Plans of the same shards are the same; params change, and with them the file.
        shards=[(s.name, *s.files, s.byte_range) for s in PLAN.shards],
    shell:
        "tokamake plan --corpora {params.corpora:q} --settings {params.settings:q}"
        " {params.declared:q} --output {output} > {log} 2>&1"


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
    conda:
        "../envs/tokamake.yaml"
    threads: 1
    params:
        text_key=lambda wildcards: CORPORA[wildcards.corpus].text_key,
        append_eod="--append-eod" if CONFIG.tokenize.append_eod else "--no-append-eod",
        byte_range=lambda wildcards: SHARDS[f"{wildcards.corpus}/{wildcards.number}"].byte_range,
        prefix=subpath(output[0], strip_suffix=".bin"),
    shell:
        "tokamake tokenize {input.raw:q} --output {params.prefix} --tokenizer {input.tokenizer[0]:q}"
        " --text-key={params.text_key:q} {params.append_eod} --byte-range={params.byte_range:q}"
        " --workers {threads} > {log} 2>&1"


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
    conda:
        "../envs/tokamake.yaml"
    params:
        corpus=lambda wildcards: MERGED[wildcards.pair].corpus,
        prefixes=lambda wildcards, input: [path.removesuffix(".bin") for path in input[::3]],
        prefix=subpath(output[0], strip_suffix=".bin"),
    shell:
        "tokamake merge {params.prefixes:q} --output {params.prefix} --corpus {params.corpus}"
        " > {log} 2>&1"


rule describe:
    "Write the metadata of every merged file, and of all of them."
    input:
        merged=[path for name in MERGED for path in pair_files(f"{DATA}/merged/{name}")],
        plan=PLAN_FILE,
    output:
        all=f"{DATA}/metadata.json",
        each=[f"{DATA}/metadata/{name}.json" for name in MERGED],
    log:
        "logs/describe.log",
    benchmark:
        "results/benchmarks/describe.tsv"
    conda:
        "../envs/tokamake.yaml"
    params:
        prefixes=[f"{DATA}/merged/{name}" for name in MERGED],
    shell:
        "tokamake describe {params.prefixes:q} --output {output.all} > {log} 2>&1"


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
    conda:
        "../envs/tokamake.yaml"
    shell:
        "tokamake weigh --corpora {input.corpora:q} --metadata {input.metadata} --output {output}"
        " > {log} 2>&1"


rule index:
    "Build the run's document, sample and shuffle indexes and its blend."
    input:
        weights=f"{DATA}/weights.txt",
        merged=[path for name in MERGED for path in pair_files(f"{DATA}/merged/{name}")],
    output:
        f"{RUN}/index/index.json",
    log:
        f"logs/{CONFIG.run}/index.log",
    benchmark:
        f"results/benchmarks/{CONFIG.run}/index.tsv"
    conda:
        "../envs/tokamake.yaml"
    params:
        sequence_length=CONFIG.train.sequence_length,
        train_samples=CONFIG.train.train_steps * CONFIG.train.global_batch_size,
        valid_samples=CONFIG.train.evaluation_steps * CONFIG.train.global_batch_size,
        split=CONFIG.train.split,
        seed=CONFIG.seed,
        data_root=subpath(input.weights, parent=True),
        folder=subpath(output[0], parent=True),
    shell:
        "tokamake index --weights {input.weights} --data-root {params.data_root}"
        " --output {params.folder} --sequence-length {params.sequence_length}"
        " --train-samples {params.train_samples}"
        " --valid-samples {params.valid_samples} --split {params.split:q} --seed {params.seed}"
        " > {log} 2>&1"


rule data:
    "Build all data: tokenized, merged, described and weighted."
    input:
        rules.describe.output,
        rules.weigh.output,
