# Targets beside `all`. The name of a rule with wildcards means its files of all runs.

from tokamake.workflow.startup import finish


rule data:
    "Build all data: tokenized, merged, described and weighted."
    input:
        rules.describe.output,
        expand(rules.weigh.output, run=CONFIG.runs),


if CONFIG.shared.detoxify:

    rule detoxify:
        "Train on the least toxic texts of the model, and compare its toxicity before and after."
        input:
            expand(rules.measure_toxicity.output, run=CONFIG.runs),


if CONFIG.shared.retrieval:

    rule retrieval:
        "Measure how often the models of all runs find the answer to a question."
        input:
            lambda wildcards: retrieval_rules.products,


finish(SNAKEMAKE, FUNCTIONS)
