"""`PUT /api`: what Megatron's clients send and read."""

import json
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
import transformers

from tests.support.served import Served
from tokamake.data.tokenizers import open_tokenizer


def ask(server: Served, **body: Any) -> Any:
    reply = server.ask("PUT", "/api", body)
    assert reply.status == 200, reply.content
    return reply.json


def test_the_fields_of_the_client_suffice(server: Served, chat_tokenizer: Path) -> None:
    tokenizer = open_tokenizer(chat_tokenizer)
    reply = ask(server, prompts=["def main"], tokens_to_generate=5)
    assert {*reply} == {"text", "segments", "logprobs"}
    assert reply["logprobs"] is None
    assert reply["text"][0].startswith("def main")
    assert "".join(reply["segments"][0]) == reply["text"][0]
    assert len(reply["segments"][0]) <= len(tokenizer.encode_batch(["def main"])[0]) + 5


def test_a_client_like_megatrons_reads_replies_and_refusals(server: Served) -> None:
    address = f"http://127.0.0.1:{server.port}/api"
    headers = {"Content-Type": "application/json"}

    def put(**body: Any) -> requests.Response:
        return requests.put(address, data=json.dumps(body), headers=headers, timeout=60)

    reply = put(prompts=["def main"], tokens_to_generate=4)
    assert reply.status_code == 200
    assert reply.json()["text"][0].startswith("def main")
    # The client prints the message of a refusal.
    refused = put(prompts=["def main"], tokens_to_generate=-1)
    assert refused.status_code == 400
    assert refused.json()["message"].startswith("tokens_to_generate: -1: give an integer")


def test_flags_may_be_null_and_beams_ignore_sampling(server: Served) -> None:
    body = {"prompts": ["The"], "tokens_to_generate": 6}
    nulls = dict.fromkeys(("logprobs", "add_BOS", "stop_on_eol", "no_log", "stop_token"))
    assert ask(server, top_k=1, **body) == ask(server, top_k=1, **nulls, **body)
    beams = ask(server, beam_width=2, **body)
    assert beams == ask(server, beam_width=2, temperature=0.5, top_k=3, **body)


def test_log_probabilities_are_those_of_transformers(
    server: Served, tiny: Path, chat_tokenizer: Path
) -> None:
    tokenizer = open_tokenizer(chat_tokenizer)
    oracle = transformers.LlamaForCausalLM.from_pretrained(tiny).eval()
    prompts = ["def main", "The"]
    reply = ask(server, prompts=prompts, tokens_to_generate=0, logprobs=True, add_BOS=True)
    for prompt, scores in zip(prompts, reply["logprobs"], strict=True):
        tokens = [tokenizer.eod, *tokenizer.encode_batch([prompt])[0]]
        with torch.no_grad():
            rows = oracle(torch.tensor([tokens])).logits[0].log_softmax(-1)
        expected = [float(rows[place, token]) for place, token in enumerate(tokens[1:])]
        assert scores == pytest.approx(expected, abs=1e-4)
    longer = ask(server, prompts=prompts, tokens_to_generate=4, logprobs=True, top_k=1)
    for segments, scores in zip(longer["segments"], longer["logprobs"], strict=True):
        assert len(scores) == len(segments) - 1


def test_a_seed_determines_the_text(server: Served) -> None:
    body = {"prompts": ["The"], "tokens_to_generate": 12, "top_p": 0.9, "random_seed": 2**60 + 1}
    first = ask(server, **body)["text"]
    assert ask(server, **body)["text"] == first
    assert ask(server, **{**body, "random_seed": 2**60})["text"] != first
    decayed = {**body, "top_p_decay": 0.5, "top_p_bound": 0.1}
    assert ask(server, **decayed)["text"] != first


@pytest.mark.parametrize(
    ("prompt", "option", "stop", "num_tokens"),
    [("a", "stop_on_eol", "\n", 4), ("a\n", "stop_on_double_eol", "\n\n", 2)],
)
def test_text_can_end_at_line_ends(
    server: Served, prompt: str, option: str, stop: str, num_tokens: int
) -> None:
    """At this temperature, all tokens are about as likely; each repetition is another sample."""
    body = {"prompts": [prompt] * 128, "tokens_to_generate": num_tokens, "temperature": 100.0}
    num_ended, len_prompt = 0, len(prompt)
    for seed in range(24 // num_tokens):
        whole = ask(server, **body, random_seed=seed)["text"]
        reply = ask(server, **body, random_seed=seed, **{option: True})
        for text, cut, segments in zip(whole, reply["text"], reply["segments"], strict=True):
            # A character that is cut in two is a replacement character.
            assert text.startswith(cut.rstrip("\N{REPLACEMENT CHARACTER}"))
            assert stop not in "".join(segments[len_prompt - len(stop) + 1 : -1])
            assert cut == text or stop in "".join(segments[len_prompt - len(stop) + 1 :])
            num_ended += cut != text
    assert num_ended


def test_a_line_does_not_end_after_a_colon(server: Served) -> None:
    body = {"prompts": [":"] * 128, "tokens_to_generate": 1, "temperature": 100.0}
    num_ends = 0
    for seed in range(12):
        num_ends += ask(server, **body, random_seed=seed)["text"].count(":\n")
        forbidden = ask(server, **body, random_seed=seed, prevent_newline_after_colon=True)
        assert ":\n" not in forbidden["text"]
    assert num_ends


def test_beams_have_the_scores_of_transformers(
    server: Served, tiny: Path, chat_tokenizer: Path
) -> None:
    tokenizer = open_tokenizer(chat_tokenizer)
    oracle = transformers.LlamaForCausalLM.from_pretrained(tiny).eval()
    reply = ask(server, prompts=["def "], tokens_to_generate=6, beam_width=3, length_penalty=0.5)
    ids = torch.tensor(tokenizer.encode_batch(["def "]))
    out = oracle.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=3,
        num_return_sequences=3,
        max_new_tokens=6,
        do_sample=False,
        length_penalty=0.5,
        eos_token_id=tokenizer.eod,
        pad_token_id=tokenizer.eod,
        return_dict_in_generate=True,
        output_scores=True,
    )
    assert reply["scores"] == pytest.approx(out.sequences_scores.tolist(), abs=1e-4)
    assert len(reply["text"]) == len({*reply["text"]}) == 3
    # The cache belongs to the engine again.
    assert ask(server, prompts=["def "], tokens_to_generate=3, top_k=1)["text"]


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "prompts: missing; add it"),
    ({"prompts": "a"}, "prompts: 'a': give a list of 1 to 128 texts"),
    ({"prompts": []}, "prompts: []: give a list of 1 to 128 texts"),
    ({"prompts": [1]}, "prompts.0: 1: give a list of 1 to 128 texts"),
    ({"prompts": ["a"] * 129}, "prompts: ['a', 'a', "),
    ({"prompts": ["a"], "max_len": 3}, "max_len: is no longer used; replace it with tokens_to_g"),
    ({"sentences": ["a"]}, "sentences: is no longer used; replace it with prompts"),
    ({"prompts": ["a"], "tokens_to_generate": -1}, "tokens_to_generate: -1: give an integer"),
    ({"prompts": ["a"], "tokens_to_generate": 0}, "tokens_to_generate: 0: only scores prompts"),
    ({"prompts": ["a"], "tokens_to_generate": 65}, "tokens_to_generate: 65: too many after a pr"),
    ({"prompts": ["a"], "temperature": 0}, "temperature: 0: give a number above 0, at most 100"),
    ({"prompts": ["a"], "temperature": 101}, "temperature: 101: give a number above 0"),
    ({"prompts": ["a"], "top_k": 1001}, "top_k: 1001: give an integer from 0 to 1000"),
    ({"prompts": ["a"], "top_k": 1, "top_p": 0.5}, "top_p: top_k is set, too; set only one"),
    ({"prompts": ["a"], "top_p_decay": 0.5}, "top_p_decay: has an effect only with top_p"),
    ({"prompts": ["a"], "top_p": 0.5, "top_p_bound": 0.6}, "top_p_bound: 0.6: above top_p"),
    ({"prompts": [""]}, "prompts: one is empty; set add_BOS to true, or give a text"),
    ({"prompts": ["a"], "logprobs": 1}, "logprobs: 1: give true or false"),
    ({"prompts": ["a"], "random_seed": -1}, "random_seed: -1: give an integer of 0 or more"),
    ({"prompts": ["a", "b"], "beam_width": 2}, "beam_width: 2 prompts; beam search takes one"),
    ({"prompts": ["a"], "beam_width": 5}, "beam_width: 5: the server has 4 places; give less"),
    ({"prompts": ["a"], "stop_token": 400}, "stop_token: token 400: not in the vocabulary"),
    ({"prompts": ["a"], "length_penalty": "1"}, "length_penalty: '1': give a number"),
    ({"prompts": ["a"], "length_penalty": 100}, "length_penalty: 100: give a number from -10 to"),
    ({"prompts": ["a"], "topk": 1}, "topk: unknown field; the fields are prompts, tokens_to_ge"),
]


@pytest.mark.parametrize(("body", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_requests_name_the_field(server: Served, body: dict[str, Any], message: str) -> None:
    defaults = {"tokens_to_generate": 5} if "prompts" in body else {}
    assert server.refusal("/api", {**defaults, **body}, method="PUT").startswith(message)


def test_other_methods_are_refused(server: Served) -> None:
    assert server.refusal("/api", {}, status=405) == "POST /api: Method Not Allowed"
