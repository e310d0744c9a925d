# Detoxification: texts of the initial model, the least toxic of which become a raw file of the data.

if CONFIG.shared.detoxify:

    wildcard_constraints:
        texts="|".join(map(re.escape, detoxify_rules.folders)),
        shard=r"\d{5}",

    rule generate_texts:
        "Write texts with the model before or after training: new ones, or continuations of prompts."
        input:
            model=detoxify_rules.model_inputs,
            tokenizer=CONFIG.run_tokenizer_files,
            prompts=detoxify_rules.prompts,
        output:
            "{texts}/generated-{shard}.jsonl",
        log:
            "logs/generate_texts/{texts}/{shard}.log",
        benchmark:
            "results/benchmarks/generate_texts/{texts}/{shard}.tsv"
        conda:
            ENVIRONMENT
        threads: 2
        resources:
            nodes=1,
            tasks=1,
        params:
            model=detoxify_rules.model,
            prompts=lambda wildcards, input: [f"--prompts={path}" for path in input.prompts],
            options=detoxify_rules.generation_options,
            layout=detoxify_rules.layout(run_settings),
        shell:
            "{resources.launch} {resources.nodes} {resources.tasks}"
            " tokamake generate-texts --checkpoint {params.model:q} --tokenizer {input.tokenizer[0]:q}"
            " {params.prompts:q} {params.options:q} {params.layout:q} --output {output:q} > {log:q} 2>&1"

    rule score_texts:
        "Score the toxicity of texts."
        input:
            detoxify_rules.texts_to_score,
        output:
            "{texts}/scored-{shard}.jsonl",
        log:
            "logs/score_texts/{texts}/{shard}.log",
        benchmark:
            "results/benchmarks/score_texts/{texts}/{shard}.tsv"
        conda:
            ENVIRONMENT
        params:
            scorer=detoxify_rules.scorer,
            files=detoxify_rules.scorer_digests,
            checked=preflight.score_texts,
        shell:
            "tokamake score-texts {input:q} --scorer {params.scorer:q} --output {output:q} > {log:q} 2>&1"

    rule select_texts:
        "Keep the least toxic texts, in a random order, as a raw file."
        input:
            detoxify_rules.scored(detoxify_rules.samples),
        output:
            kept=DATA_SET.kept_texts,
            summary=f"{DATA_SET.detoxify}/kept.json",
        log:
            f"{DATA_SET.logs}/select_texts.log",
        benchmark:
            f"{DATA_SET.benchmarks}/select_texts.tsv"
        conda:
            ENVIRONMENT
        params:
            options=options(CONFIG.shared.detoxify, only=("keep", "seed")),
        shell:
            "tokamake select-texts {input:q} {params.options:q} --output {output.kept:q}"
            " --summary {output.summary:q} > {log:q} 2>&1"

    rule measure_toxicity:
        "Compare toxicity and perplexity of a model before and after training."
        input:
            before=detoxify_rules.scored_before,
            after=detoxify_rules.scored_after,
            evaluation_before=f"{RUN}/evaluate.0.json",
            evaluation_after=f"{RUN}/evaluate.json",
            selection=rules.select_texts.output.summary,
        output:
            f"{RUN}/detoxify.json",
        log:
            "logs/{run}/measure_toxicity.log",
        benchmark:
            "results/benchmarks/{run}/measure_toxicity.tsv"
        conda:
            ENVIRONMENT
        params:
            before=lambda wildcards, input: [f"--before={path}" for path in input.before],
            after=lambda wildcards, input: [f"--after={path}" for path in input.after],
        shell:
            "tokamake measure-toxicity {params.before:q} {params.after:q}"
            " --evaluation-before {input.evaluation_before:q} --evaluation-after {input.evaluation_after:q}"
            " --selection {input.selection:q} --output {output:q} > {log:q} 2>&1"
