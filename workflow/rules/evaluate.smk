# Loss of the exported model on held-out text, and text that it generates.


rule evaluate:
    "Measure perplexity and bits per byte on the held-out documents, after each segment too."
    input:
        model=segments.evaluated_inputs,
        weights=WEIGHTS,
        held_out=sample_rules.evaluation_weights,
        neighbors=retro_rules.retrieved_inputs,
        tokenizer=CONFIG.run_tokenizer_files,
    output:
        f"{RUN}/evaluate{{segment}}.json",
    log:
        "logs/{run}/evaluate{segment}.log",
    benchmark:
        "results/benchmarks/{run}/evaluate{segment}.tsv"
    wildcard_constraints:
        segment=r"(\.(0|[1-9]\d*))?",
    conda:
        ENVIRONMENT
    threads: 2
    resources:
        nodes=1,
        tasks=1,
    params:
        model=segments.evaluated_model,
        split=run_settings.value("train.split"),
        split_rule=run_settings.value("train.split_rule"),
        held_out=sample_rules.evaluation_options,
        neighbors=retro_rules.retrieval_options,
        sequence_length=run_settings.value("train.sequence_length"),
        max_tokens=run_settings.value("evaluate.max_tokens"),
        data_root=subpath(input.weights, parent=True),
        dtype=run_settings.value("evaluate.dtype"),
        layout=run_settings.evaluation_options,
    shell:
        "{resources.launch} {resources.nodes} {resources.tasks}"
        " tokamake evaluate --checkpoint {params.model:q} --weights {input.weights:q}"
        " --data-root {params.data_root:q} --tokenizer {input.tokenizer[0]:q} --split {params.split:q}"
        " --split-rule {params.split_rule:q} {params.held_out:q} {params.neighbors:q}"
        " --sequence-length {params.sequence_length:q} --max-tokens {params.max_tokens:q}"
        " --dtype {params.dtype:q} {params.layout:q}"
        " --output {output:q} > {log:q} 2>&1"


if task_rules.fetched:

    rule fetch_task:
        "Download the data of a task."
        output:
            f"{RUN}/tasks/{{task}}.fetched",
        log:
            "logs/{run}/fetch_task/{task}.log",
        benchmark:
            "results/benchmarks/{run}/fetch_task/{task}.tsv"
        localrule: True  # compute nodes have no network
        conda:
            ENVIRONMENT
        params:
            plug_in=task_rules.plug_in,
            settings=task_rules.settings,
        shell:
            "tokamake fetch-task {params.plug_in:q} --settings {params.settings:q} --output {output:q}"
            " > {log:q} 2>&1"


if task_rules.names:

    rule evaluate_task:
        "Score the model on a task, after each segment too."
        input:
            model=segments.evaluated_inputs,
            tokenizer=CONFIG.run_tokenizer_files,
            data=task_rules.local_inputs,
            fetched=task_rules.fetched_inputs,
            neighbors=retro_rules.retrieved_inputs,
        output:
            f"{RUN}/tasks/{{task}}{{segment}}.json",
        log:
            "logs/{run}/tasks/{task}{segment}.log",
        benchmark:
            "results/benchmarks/{run}/tasks/{task}{segment}.tsv"
        conda:
            ENVIRONMENT
        threads: 2
        resources:
            nodes=1,
            tasks=1,
        params:
            plug_in=task_rules.plug_in,
            settings=task_rules.settings,
            fetched=lambda wildcards, input: [f"--fetched={path}" for path in input.fetched],
            neighbors=lambda wildcards: retro_rules.retrieval_options(wildcards, data_root=DATA),
            model=segments.evaluated_model,
            sequence_length=run_settings.value("train.sequence_length"),
            dtype=run_settings.value("evaluate.dtype"),
            layout=run_settings.evaluation_options,
        shell:
            "{resources.launch} {resources.nodes} {resources.tasks}"
            " tokamake evaluate-task {params.plug_in:q} --checkpoint {params.model:q}"
            " --settings {params.settings:q} {params.fetched:q} {params.neighbors:q}"
            " --tokenizer {input.tokenizer[0]:q}"
            " --sequence-length {params.sequence_length:q} --dtype {params.dtype:q} {params.layout:q}"
            " --output {output:q} > {log:q} 2>&1"


rule generate:
    "Let the exported model continue the config's prompts."
    input:
        model=f"{RUN}/export",
        tokenizer=CONFIG.run_tokenizer_files,
        neighbors=retro_rules.retrieved_inputs,
    output:
        f"{RUN}/samples.json",
    log:
        "logs/{run}/generate.log",
    benchmark:
        "results/benchmarks/{run}/generate.tsv"
    conda:
        ENVIRONMENT
    threads: 2
    resources:
        nodes=1,
        tasks=1,
    params:
        options=lambda wildcards: [
            *run_settings.generate_options(wildcards),
            *retro_rules.retrieval_options(wildcards, data_root=DATA),
        ],
        layout=run_settings.inference_options,
    shell:
        "{resources.launch} {resources.nodes} {resources.tasks}"
        " tokamake generate --checkpoint {input.model:q} --tokenizer {input.tokenizer[0]:q}"
        " {params.options:q} {params.layout:q}"
        " --output {output:q} > {log:q} 2>&1"
