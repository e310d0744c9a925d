# Raw text to weighted indexed datasets and the sample index of a run.

if CONFIG.shared.sample_corpus:

    rule sample_corpus:
        "Harvest small corpora of real text from the Python standard library."
        output:
            list(CONFIG.sample_files),
        log:
            "logs/sample_corpus.log",
        benchmark:
            "results/benchmarks/sample_corpus.tsv"
        conda:
            ENVIRONMENT
        params:
            settings=run_settings.section("sample_corpus"),
        shell:
            "tokamake sample-corpus --settings {params.settings:q} --output results/raw > {log:q} 2>&1"


if CONFIG.given_tokenizer is None:
    # Text that is token ids trains none: its job writes down the number of ids.
    TOKENIZER_JOB = "count_ids" if CONFIG.shared.tokenizer.has_ids else "train_tokenizer"

    rule train_tokenizer:
        "Train a tokenizer on the raw corpora."
        name:
            TOKENIZER_JOB
        input:
            data_rules.tokenizer_corpus(),
            data_rules.tokenizer_downloads(),
            plan=data_rules.plan_file,
        output:
            CONFIG.tokenizer_files,
        log:
            f"{DATA_SET.logs}/{TOKENIZER_JOB}.log",
        benchmark:
            f"{DATA_SET.benchmarks}/{TOKENIZER_JOB}.tsv"
        conda:
            ENVIRONMENT
        params:
            corpora=CONFIG.tokenizer_stamp,
            kind=CONFIG.shared.tokenizer.kind,
            vocab_size=CONFIG.shared.tokenizer.vocab_size,
            train_bytes=CONFIG.shared.tokenizer.train_bytes,
            # A function, since Snakemake takes braces in a text for wildcards.
            special_tokens=lambda wildcards: [
                *(f"--special-tokens={token}" for token in CONFIG.shared.tokenizer.special_tokens),
                *options(CONFIG.shared.tokenizer, only=("eod",)),
            ],
            # A function of the output is not among the params that train again when they change.
            on_bad_document=lambda wildcards, output: CONFIG.shared.tokenize.on_bad_document,
            folder=subpath(output[0], parent=True),
        shell:
            "tokamake train-tokenizer --plan {input.plan:q} --kind {params.kind:q}"
            " --vocab-size {params.vocab_size:q} --train-bytes {params.train_bytes:q}"
            " {params.special_tokens:q}"
            " --on-bad-document {params.on_bad_document:q} --output {params.folder:q} > {log:q} 2>&1"


if CONFIG.shared.tokenizer.sentinels:

    rule extend_tokenizer:
        "Append the tokens of T5 to the tokenizer of the data, for the runs."
        input:
            CONFIG.tokenizer_files,
        output:
            CONFIG.run_tokenizer_files,
        log:
            f"{DATA_SET.logs}/extend_tokenizer.log",
        benchmark:
            f"{DATA_SET.benchmarks}/extend_tokenizer.tsv"
        conda:
            ENVIRONMENT
        params:
            sentinels=CONFIG.shared.tokenizer.sentinels,
            folder=subpath(output[0], parent=True),
        shell:
            "tokamake extend-tokenizer --tokenizer {input[0]:q} --sentinels {params.sentinels:q}"
            " --output {params.folder:q} > {log:q} 2>&1"


if CONFIG.downloads:

    rule fetch:
        "Download the raw files of a job batch that are behind addresses."
        input:
            plan=data_rules.plan_file,
        output:
            # Temporary: a job that runs again asks for its files again, wherever they are then.
            temp(DATA_SET.batch_file("fetch/{stage}", "{batch}")),
        log:
            f"{DATA_SET.logs}/fetch/{{stage}}-{{batch}}.log",
        benchmark:
            f"{DATA_SET.benchmarks}/fetch/{{stage}}-{{batch}}.tsv"
        wildcard_constraints:
            stage="tokenize|hash_documents|sign_documents|hash_passages|train_tokenizer",
            batch="|".join(map(re.escape, [ALL, *CONFIG.batch_names])),
        localrule: True  # compute nodes have no network
        conda:
            ENVIRONMENT
        params:
            files=data_rules.downloads_digest,
            # A function of the output: other limits do not fetch pages again.
            urls=lambda wildcards, output: run_settings.section("fetch_urls")(wildcards),
        shell:
            "tokamake fetch-batch --plan {input.plan:q} --batch {wildcards.batch:q}"
            " --urls {params.urls:q} --output {output:q} > {log:q} 2>&1"


if CONFIG.shared.tokenize.deduplicate:

    rule hash_documents:
        "Hash each document of a batch of shards, so that equal ones can be found."
        input:
            data_rules.raw_files,
            data_rules.downloads_for("hash_documents"),
            plan=data_rules.plan_file,
        output:
            f"{DATA}/hashes/{{batch}}.rows",
        log:
            f"{DATA_SET.logs}/hash_documents/{{batch}}.log",
        benchmark:
            f"{DATA_SET.benchmarks}/hash_documents/{{batch}}.tsv"
        conda:
            ENVIRONMENT
        params:
            shards=data_rules.hashed_shards_digest,
            corpus=data_rules.hash_options,
        shell:
            "tokamake hash-documents --plan {input.plan:q} --batch {wildcards.batch:q}"
            " {params.corpus:q} --output {output:q} > {log:q} 2>&1"

    rule find_duplicates:
        "Find the documents whose text occurred before, in their corpus or in any."
        input:
            data_rules.corpus_hashes,
        output:
            f"{DATA}/duplicates/{{scope}}.rows",
        log:
            f"{DATA_SET.logs}/find_duplicates/{{scope}}.log",
        benchmark:
            f"{DATA_SET.benchmarks}/find_duplicates/{{scope}}.tsv"
        conda:
            ENVIRONMENT
        shell:
            "tokamake find-duplicates {input:q} --output {output:q} > {log:q} 2>&1"


if CONFIG.shared.tokenize.near_duplicates:

    rule sign_documents:
        "Compute the MinHash band keys of each document of a batch of shards."
        input:
            data_rules.raw_files,
            data_rules.downloads_for("sign_documents"),
            duplicates=data_rules.equal_documents,
            plan=data_rules.plan_file,
        output:
            f"{DATA}/near_duplicates/signed/{{batch}}.rows",
        log:
            f"{DATA_SET.logs}/sign_documents/{{batch}}.log",
        benchmark:
            f"{DATA_SET.benchmarks}/sign_documents/{{batch}}.tsv"
        conda:
            ENVIRONMENT
        params:
            shards=data_rules.filtered_shards_digest,
            corpus=data_rules.tokenize_options,
            duplicates=lambda wildcards, input: [
                f"--duplicates={path}" for path in input.duplicates
            ],
            # A function of the output: another value does not run finished jobs again.
            on_bad_document=lambda wildcards, output: CONFIG.shared.tokenize.on_bad_document,
            options=options(CONFIG.shared.tokenize.near_duplicates, leave_out=("scope", "against")),
        shell:
            "tokamake sign-documents --plan {input.plan:q} --batch {wildcards.batch:q}"
            " {params.corpus:q} {params.duplicates:q} {params.options:q}"
            " --on-bad-document {params.on_bad_document:q} --output {output:q} > {log:q} 2>&1"

    rule find_near_duplicates:
        "Find the documents that are nearly the same as an earlier one."
        input:
            signed=data_rules.signed_documents,
            plan=data_rules.plan_file,
            against=[*map(str, CONFIG.shared.tokenize.near_duplicates.against)],
        output:
            rows=f"{DATA}/near_duplicates/{{scope}}.rows",
            table=f"{DATA}/near_duplicates/{{scope}}.parquet",
            band_keys=f"{DATA}/near_duplicates/{{scope}}.keys",
        log:
            f"{DATA_SET.logs}/find_near_duplicates/{{scope}}.log",
        benchmark:
            f"{DATA_SET.benchmarks}/find_near_duplicates/{{scope}}.tsv"
        conda:
            ENVIRONMENT
        threads: 2
        params:
            against=lambda wildcards, input: [f"--against={path}" for path in input.against],
        shell:
            "tokamake find-near-duplicates {input.signed:q} --plan {input.plan:q} --output {output.rows:q}"
            " --table {output.table:q} --keys {output.band_keys:q} {params.against:q} --workers {threads}"
            " > {log:q} 2>&1"


if CONFIG.shared.tokenize.repeats:

    rule hash_passages:
        "Hash the lines, paragraphs or sequences of words of a batch of shards."
        input:
            data_rules.raw_files,
            data_rules.downloads_for("hash_passages"),
            duplicates=data_rules.corpus_duplicates,
            plan=data_rules.plan_file,
        output:
            f"{DATA}/repeats/hashed/{{batch}}.rows",
        log:
            f"{DATA_SET.logs}/hash_passages/{{batch}}.log",
        benchmark:
            f"{DATA_SET.benchmarks}/hash_passages/{{batch}}.tsv"
        conda:
            ENVIRONMENT
        params:
            shards=data_rules.filtered_shards_digest,
            corpus=data_rules.tokenize_options,
            duplicates=lambda wildcards, input: [
                f"--duplicates={path}" for path in input.duplicates
            ],
            # A function of the output: another value does not run finished jobs again.
            on_bad_document=lambda wildcards, output: CONFIG.shared.tokenize.on_bad_document,
            options=options(CONFIG.shared.tokenize.repeats, leave_out=("scope",)),
        shell:
            "tokamake hash-passages --plan {input.plan:q} --batch {wildcards.batch:q}"
            " {params.corpus:q} {params.duplicates:q} {params.options:q}"
            " --on-bad-document {params.on_bad_document:q} --output {output:q} > {log:q} 2>&1"

    rule find_repeats:
        "Find the lines, paragraphs or sequences of words that occurred before."
        input:
            data_rules.hashed_passages,
        output:
            f"{DATA}/repeats/{{scope}}.rows",
        log:
            f"{DATA_SET.logs}/find_repeats/{{scope}}.log",
        benchmark:
            f"{DATA_SET.benchmarks}/find_repeats/{{scope}}.tsv"
        conda:
            ENVIRONMENT
        shell:
            "tokamake find-repeats {input:q} --output {output:q} > {log:q} 2>&1"


rule tokenize:
    "Tokenize raw files into the shards of a job batch."
    input:
        raw=data_rules.tokenize_inputs,
        downloads=data_rules.downloads_for("tokenize"),
        tokenizer=CONFIG.tokenizer_files,
        duplicates=data_rules.corpus_duplicates,
        repeats=data_rules.corpus_repeats,
        plan=data_rules.plan_file,
    output:
        # Temporary if shards are: a merge that runs again then tokenizes them again.
        DATA_SET.batch_file("tokenize", "{batch}")
        if CONFIG.shared.plan.keep_shards
        else temp(DATA_SET.batch_file("tokenize", "{batch}")),
    log:
        f"{DATA_SET.logs}/tokenize/{{batch}}.log",
    benchmark:
        f"{DATA_SET.benchmarks}/tokenize/{{batch}}.tsv"
    conda:
        ENVIRONMENT
    threads: 1
    params:
        checked=preflight.tokenize,
        shards=data_rules.filtered_shards_digest,
        corpus=data_rules.tokenize_options,
        # Options of `repeats` are here, too: a changed command reruns finished jobs.
        duplicates=lambda wildcards, input: [
            *(f"--duplicates={path}" for path in input.duplicates),
            *(f"--repeats={path}" for path in input.repeats),
        ],
        options=options(
            CONFIG.shared.tokenize,
            leave_out=("deduplicate", "near_duplicates", "repeats", "filters", "filter_seconds"),
        ),
        folder=f"{DATA}/shards",
    shell:
        "tokamake tokenize-batch --plan {input.plan:q} --batch {wildcards.batch:q}"
        " --output {params.folder:q} --summary {output:q} --tokenizer {input.tokenizer[0]:q} {params.corpus:q}"
        " {params.duplicates:q} {params.options:q} --workers {threads} > {log:q} 2>&1"


rule merge:
    "Merge shards, or check and link existing indexed datasets: the merged datasets of a job batch."
    input:
        shards=data_rules.merge_inputs,
        tokenizer=data_rules.links_tokenizer,
        plan=data_rules.plan_file,
    output:
        DATA_SET.batch_file("merge", "{batch}"),
    log:
        f"{DATA_SET.logs}/merge/{{batch}}.log",
    benchmark:
        f"{DATA_SET.benchmarks}/merge/{{batch}}.tsv"
    priority: 0 if CONFIG.shared.plan.keep_shards else 1  # shards should not wait for their deletion
    conda:
        ENVIRONMENT
    params:
        pairs=data_rules.merges_digest,
        shards=f"{DATA}/shards",
        folder=f"{DATA}/merged",
        tokenizer=lambda wildcards, input: [f"--tokenizer={path}" for path in input.tokenizer[:1]],
        options=data_rules.links_options,
    shell:
        "tokamake merge-batch --plan {input.plan:q} --batch {wildcards.batch:q} --input {params.shards:q}"
        " --output {params.folder:q} --summary {output:q} {params.tokenizer:q} {params.options:q}"
        " > {log:q} 2>&1"


rule describe:
    "Write the metadata of every merged dataset, and of all of them."
    input:
        data_rules.merge_files(),
        plan=data_rules.plan_file,
    output:
        DATA_SET.metadata,
    log:
        f"{DATA_SET.logs}/describe.log",
    benchmark:
        f"{DATA_SET.benchmarks}/describe.tsv"
    conda:
        ENVIRONMENT
    params:
        pairs=data_rules.datasets_digest(),
        folder=f"{DATA}/merged",
    shell:
        "tokamake describe --plan {input.plan:q} --input {params.folder:q} --output {output:q}"
        " > {log:q} 2>&1"


rule weigh:
    "Write the weighting file of a run: weight, prefix and corpus of every merged dataset."
    input:
        metadata=DATA_SET.metadata,
        corpora=data_rules.table_files,
        plan=data_rules.weights_plan,
    output:
        weights=WEIGHTS,
        held_out=[split_weights(WEIGHTS, split) for split in CONFIG.splits],
    log:
        "logs/{run}/weigh.log",
    benchmark:
        "results/benchmarks/{run}/weigh.tsv"
    conda:
        ENVIRONMENT
    params:
        corpora=data_rules.table_options,
        length=sample_rules.length_options,
    shell:
        "tokamake weigh {params.corpora:q} --metadata {input.metadata:q}"
        " --output {output.weights:q} {params.length:q} > {log:q} 2>&1"


rule index:
    "Build the run's document, sample and shuffle indexes and its blend."
    input:
        weights=WEIGHTS,
        held_out=[split_weights(WEIGHTS, split) for split in CONFIG.splits],
        merged=data_rules.merge_files(),
        tokenizer=sample_rules.objective_tokenizer,
    output:
        f"{RUN}/index/index.json",
    log:
        "logs/{run}/index.log",
    benchmark:
        "results/benchmarks/{run}/index.tsv"
    conda:
        ENVIRONMENT
    params:
        checked=preflight.index,
        samples=sample_rules.sample_options,
        held_out=sample_rules.held_out_options,
        options=run_settings.options("train", only=INDEX_SETTINGS),
        seed=run_settings.value("seed"),
        data_root=subpath(input.weights, parent=True),
        folder=subpath(output[0], parent=True),
    shell:
        "tokamake index --weights {input.weights:q} --data-root {params.data_root:q}"
        " --output {params.folder:q} {params.samples:q} {params.held_out:q} {params.options:q}"
        " --seed {params.seed:q} > {log:q} 2>&1"
