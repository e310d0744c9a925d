"""Measure how fast tokens are scored, beside lm-eval's own model class on transformers.

    python benchmarks/evaluating.py --models tiny --tokens 1000000 --work benchmark-work

Needs `pip install 'tokamake[oracles]'`. Both score the same documents with the same random Llama,
in fp32, in one process and with the same threads; their sums are compared. Rounds are interleaved.
"""

import argparse
import logging
import statistics
import time
from pathlib import Path
from types import SimpleNamespace

import lm_eval.models.huggingface as hugging_face
import torch
import transformers
from generating import CONTEXT, SHAPES, make_model
from serving import make_tokenizer

from tokamake.checkpoint.detect import open_any
from tokamake.data.tokenizers import open_tokenizer
from tokamake.evaluate.harness_model import HarnessModel
from tokamake.evaluate.scorer import Scorer
from tokamake.inference.driven_model import DrivenModel
from tokamake.inference.layout import WHOLE_MODEL, Peers
from tokamake.inference.model import InferenceModel
from tokamake.runtime.ranks import Ranks


def main() -> None:
    """Measure each model."""
    options = _options()
    logging.disable(logging.WARNING)
    tokenizer_folder = make_tokenizer(options.work / "tokenizer")
    tokenizer = open_tokenizer(tokenizer_folder)
    print("model    tokens   tokens/s   lm-eval's hf   ratio   greatest difference of a document")
    for name in options.models:
        folder = make_model(options.work / name, name)
        requests = documents(options.tokens, tokenizer.decode)
        theirs = hugging_face.HFLM(
            pretrained=transformers.LlamaForCausalLM.from_pretrained(folder),
            tokenizer=transformers.PreTrainedTokenizerFast.from_pretrained(tokenizer_folder),
            batch_size=options.batch_size,
            max_length=CONTEXT,
        )
        alone = Peers(Ranks(0, 1, 0, 1), torch.device("cpu"))
        model = DrivenModel(InferenceModel(open_any(folder), WHOLE_MODEL, peers=alone), 1)
        scorer = Scorer(model, tokenizer, sequence_length=CONTEXT, batch_size=options.batch_size)
        ours = HarnessModel(scorer)
        counted = sum(len(tokenizer.encode_batch([r.args[0]])[0]) for r in requests)
        seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
        sums = {}
        for _ in range(options.rounds):
            for key, contestant in (("ours", ours), ("theirs", theirs)):
                begin = time.perf_counter()
                sums[key] = contestant.loglikelihood_rolling(requests, disable_tqdm=True)
                seconds[key].append(time.perf_counter() - begin)
        speeds = {key: counted / statistics.median(values) for key, values in seconds.items()}
        differences = (
            abs(a - b) / abs(b) for a, b in zip(sums["ours"], sums["theirs"], strict=True)
        )
        print(
            f"{name:5} {counted:9,} {speeds['ours']:10,.0f} {speeds['theirs']:14,.0f} "
            f"{speeds['ours'] / speeds['theirs']:7.2f}   {max(differences):.1e}",
            flush=True,
        )


def documents(num_tokens: int, decode: object) -> list[SimpleNamespace]:
    """Requests for the whole log-probabilities of random texts of 200 to 2,000 tokens."""
    assert callable(decode)
    generator = torch.Generator().manual_seed(0)
    requests = []
    while num_tokens > 0:
        length = int(torch.randint(200, 2000, (1,), generator=generator))
        tokens = torch.randint(300, 900, (min(length, num_tokens),), generator=generator)
        requests.append(SimpleNamespace(args=(decode(tokens.tolist()),)))
        num_tokens -= length
    return requests


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=[*SHAPES])
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path("benchmark-work"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
