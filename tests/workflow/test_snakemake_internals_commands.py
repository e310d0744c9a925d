"""Commands of rules stay as they are: Snakemake runs finished jobs again if theirs has changed.

An upgrade of tokamake would then tokenize and train again. New options belong into params that
exist (as lists that are empty by default). If a command must change, `_FORMER_PARAMS` in
`workflow/snakemake_internals.py` translates its former text.
"""

import ast
import hashlib
import re

from tests.support.paths import ROOT

DIGESTS = {
    "chunk_documents": "2d568988",
    "convert": "5ca43bac",
    "describe": "fc1d60bb",
    "doctor": "4e4e7b46",
    "embed_blocks": "4881444e",
    "embed_passages": "7aa8c5b9",
    "embed_questions": "1c4411ae",
    "embed_chunks": "3e3c373a",
    "embed_samples": "977d89cc",
    "evaluate": "86582ef6",
    "evaluate_finetuned": "9f0cdf99",
    "evaluate_retrieval": "f6e73f9b",
    "evaluate_task": "1a7e173b",
    "export_finetuned": "fcf11e1c",
    "export_hf": "02e9413d",
    "extend_tokenizer": "3fba4178",
    "fetch": "ab2ec59c",
    "fetch_task": "171d7fcc",
    "fetch_weights": "9a65fb95",
    "find_duplicates": "22bf2ca8",
    "find_near_duplicates": "aaab4181",
    "find_neighbors": "cf57bc8b",
    "find_repeats": "9c8dbe3c",
    "finetune": "fee97f89",
    "generate": "31b9c236",
    "generate_texts": "8782c18e",
    "hash_documents": "47c32f61",
    "hash_passages": "08bbe108",
    "import_checkpoint": "77710213",
    "index": "6ee5caf9",
    "index_blocks": "b2f28def",
    "index_chunks": "1a346671",
    "measure_toxicity": "fc8fa054",
    "merge": "8169afa4",
    "model_card": "e26f786c",
    "plan_segments": "ee88cabe",
    "prepare_finetune": "a507b61a",
    "push": "9c946d2d",
    "report": "158b8ace",
    "resolve": "23fd3b77",
    "sample_corpus": "5be7d32b",
    "score_texts": "97141bec",
    "search": "e1a0698a",
    "search_bm25": "f7c0864c",
    "select_texts": "9fe140b9",
    "sign_documents": "56e27bfc",
    "tokenize": "7c2ae306",
    "train": "c2729014",
    "train_tokenizer": "934b3ed3",
    "weigh": "284a594a",
}


def commands() -> dict[str, str]:
    """Digest of the command of each rule."""
    found = {}
    for path in sorted((ROOT / "workflow/rules").glob("*.smk")):
        for block in re.split(r"^ *(?:rule|checkpoint) ", path.read_text(), flags=re.MULTILINE)[1:]:
            lines = re.search(r"^ *shell:\n((?: +[\"'].*\n?)+)", block, re.MULTILINE)
            if lines:
                text = ast.literal_eval(f"({lines[1]})")
                found[block.partition(":")[0]] = hashlib.sha256(text.encode()).hexdigest()[:8]
    return found


def test_no_command_has_changed() -> None:
    assert commands() == DIGESTS
