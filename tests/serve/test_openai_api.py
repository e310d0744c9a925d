"""`/v1`: replies have the text and log-probabilities of transformers."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.support.bos_tokenizers import write_bos_tokenizer
from tests.support.served import TEMPLATE, Served, served
from tokamake.data.tokenizers import open_tokenizer
from tokamake.generate.generate import Ends, generate
from tokamake.inference.sampling_settings import Sampling
from tokamake.serve.served_model import ServedModel

GREEDY = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def oracle(tiny: Path) -> transformers.LlamaForCausalLM:
    """The model as transformers reads it."""
    return transformers.LlamaForCausalLM.from_pretrained(tiny).eval()


def log_probabilities(oracle: transformers.LlamaForCausalLM, tokens: list[int]) -> torch.Tensor:
    """Of each token, after the tokens before it."""
    with torch.no_grad():
        return oracle(torch.tensor([tokens])).logits[0].log_softmax(-1)


def test_greedy_text_is_that_of_transformers(
    server: Served, oracle: transformers.LlamaForCausalLM, chat_tokenizer: Path
) -> None:
    tokenizer = open_tokenizer(chat_tokenizer)
    prompts = ["def main", "Return", "The list of words"]
    reply = server.complete(prompt=prompts, model="tiny", **GREEDY)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    total = 0
    for prompt, choice in zip(prompts, reply["choices"], strict=True):
        tokens = tokenizer.encode_batch([prompt])[0]
        ids = torch.tensor([tokens])
        out = oracle.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=12,
            eos_token_id=tokenizer.eod,
            pad_token_id=tokenizer.eod,
        )
        new = out[0, len(tokens) :].tolist()
        total += len(new)
        is_ended = new[-1] == tokenizer.eod
        assert choice["text"] == tokenizer.decode(new[:-1] if is_ended else new)
        assert choice["finish_reason"] == ("stop" if is_ended else "length")
    assert reply["usage"]["completion_tokens"] == total
    assert reply["model"] == "tiny"
    assert reply["object"] == "text_completion"


def test_log_probabilities_are_those_of_transformers(
    server: Served, oracle: transformers.LlamaForCausalLM, chat_tokenizer: Path
) -> None:
    tokenizer = open_tokenizer(chat_tokenizer)
    reply = server.complete(prompt="def main", echo=True, logprobs=3, **GREEDY)
    (choice,) = reply["choices"]
    scores = choice["logprobs"]
    assert "".join(scores["tokens"]) == choice["text"]
    assert scores["text_offset"] == [
        len("".join(scores["tokens"][:place])) for place in range(len(scores["tokens"]))
    ]
    prompt = tokenizer.encode_batch(["def main"])[0]
    again = server.complete(prompt="def main", **GREEDY)
    tokens = prompt + tokenizer.encode_batch([again["choices"][0]["text"]])[0]
    expected = log_probabilities(oracle, tokens)
    assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is None
    for place in range(1, len(prompt)):
        row = expected[place - 1]
        assert scores["token_logprobs"][place] == pytest.approx(float(row[tokens[place]]), abs=1e-4)
        best = sorted(scores["top_logprobs"][place].values(), reverse=True)
        assert best[:3] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
    # The most likely token has exactly the highest of the values: clients compare them.
    for score, top in zip(scores["token_logprobs"], scores["top_logprobs"], strict=True):
        if top:
            assert score in top.values()
            assert (score == max(top.values())) == (score >= max(top.values()))


def test_a_prompt_can_be_scored_without_new_tokens(server: Served) -> None:
    tokens = [5, 6, 7, 8]
    whole = server.complete(prompt=[tokens], max_tokens=1, echo=True, logprobs=1, temperature=0)
    alone = server.complete(prompt=[tokens], max_tokens=0, echo=True, logprobs=1)
    (first,), (second,) = whole["choices"], alone["choices"]
    assert first["logprobs"]["token_logprobs"][:4] == second["logprobs"]["token_logprobs"]
    # lm-eval cuts the last token off, whatever it is, so one always is there.
    assert len(first["logprobs"]["tokens"]) == 5
    assert whole["usage"] == {"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5}


@pytest.mark.parametrize("logprobs", [None, 2])
def test_a_streamed_reply_is_the_whole_one_in_parts(server: Served, logprobs: int | None) -> None:
    body = {"prompt": ["The", "def "], "n": 2, "seed": 3, "max_tokens": 20, "logprobs": logprobs}
    body |= {"echo": True, "stop": ["e "]}
    whole = server.complete(**body)
    reply = server.ask(
        "POST",
        "/v1/completions",
        {**body, "stream": True, "stream_options": {"include_usage": True}},
    )
    assert reply.headers["content-type"].startswith("text/event-stream")
    *parts, last = reply.events
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    # On a busy machine, one part may have many tokens.
    assert len(parts) > len(whole["choices"])
    for choice in whole["choices"]:
        own = [c for part in parts for c in part["choices"] if c["index"] == choice["index"]]
        assert "".join(part["text"] for part in own) == choice["text"]
        assert [part["finish_reason"] for part in own][-1] == choice["finish_reason"]
        # A choice that stops early may come in one part.
        assert all(part["finish_reason"] is None for part in own[:-1])
        for key in choice["logprobs"] or ():
            joined = [value for part in own for value in part["logprobs"][key]]
            assert joined == choice["logprobs"][key], key


def test_a_sample_depends_on_its_seed_alone(
    server: Served, tiny: Path, chat_tokenizer: Path, tmp_path: Path
) -> None:
    body = {"prompt": "The", "n": 3, "seed": 5, "temperature": 0.9, "max_tokens": 8}
    texts = [choice["text"] for choice in server.complete(**body)["choices"]]
    assert len({*texts}) == 3
    again = server.complete(**{**body, "prompt": ["def ", "The"]})["choices"]
    assert [choice["text"] for choice in again[3:]] == texts
    unseeded = {**body, "seed": None, "n": 1, "max_tokens": 20}
    assert server.complete(**unseeded)["choices"] != server.complete(**unseeded)["choices"]
    output = tmp_path / "samples.json"
    generate(
        checkpoint=tiny,
        tokenizer=chat_tokenizer,
        prompts=("The", "The", "The"),
        ends=Ends(8),
        sampling=Sampling(0.9, 0, seed=5),
        output=output,
    )
    assert [sample["text"] for sample in json.loads(output.read_text())] == texts


def test_text_ends_before_a_stop_text(server: Served) -> None:
    (plain,) = server.complete(prompt="The", **GREEDY)["choices"]
    stop = plain["text"][4:6]
    (choice,) = server.complete(prompt="The", stop=stop, **GREEDY)["choices"]
    assert choice["text"] == plain["text"].partition(stop)[0]
    assert choice["finish_reason"] == "stop"


def test_text_ends_before_a_stop_token(server: Served, chat_tokenizer: Path) -> None:
    (plain,) = server.complete(prompt="The", logprobs=0, **GREEDY)["choices"]
    texts = plain["logprobs"]["tokens"]
    # A text with a part of a character is not encoded as the tokens that were drawn.
    whole = [text for text in texts[1:] if text and "\N{REPLACEMENT CHARACTER}" not in text]
    encoded = open_tokenizer(chat_tokenizer).encode_batch(whole)
    stop = next(tokens[0] for tokens in encoded if len(tokens) == 1)
    (choice,) = server.complete(prompt="The", stop_token_ids=[0, stop], **GREEDY)["choices"]
    text = choice["text"].rstrip("\N{REPLACEMENT CHARACTER}")
    assert plain["text"].startswith(text)
    assert len(text) < len("".join(texts))
    assert choice["finish_reason"] == "stop"


def test_fields_without_an_effect_may_be_null(server: Served) -> None:
    names = ("n", "top_k", "min_p", "repetition_penalty", "stop_token_ids", "logprobs", "store")
    plain = server.complete(prompt="The", **GREEDY)["choices"]
    nulls = dict.fromkeys(names)
    assert server.complete(prompt="The", **nulls, **GREEDY)["choices"] == plain
    body = {"messages": [{"role": "user", "content": "list\nwords"}], "temperature": 0}
    reply = server.ask("POST", "/v1/chat/completions", body)
    parts = [{"type": "text", "text": text} for text in ("list", "words")]
    body["messages"] = [{"role": "user", "content": parts}]
    body |= {"response_format": {"type": "text"}, "tools": [], "tool_choice": "none"}
    body |= {"metadata": {"run": "a"}, "parallel_tool_calls": True, "store": False}
    again = server.ask("POST", "/v1/chat/completions", body)
    assert again.status == 200, again.content
    assert again.json["choices"] == reply.json["choices"]


def test_fields_that_clients_send_by_default_change_nothing(server: Served) -> None:
    plain = server.complete(prompt="The", **GREEDY)["choices"]
    defaults = {"top_k": -1, "ignore_eos": False, "min_tokens": 0, "skip_special_tokens": True}
    defaults |= {"logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0.0}
    defaults |= {"repetition_penalty": 1.0, "use_beam_search": False, "service_tier": "auto"}
    defaults |= {"response_format": {"type": "text"}, "spaces_between_special_tokens": True}
    defaults |= {"include_stop_str_in_output": False, "safety_identifier": "a"}
    defaults |= {"prompt_cache_key": "a", "add_special_tokens": True}
    assert server.complete(prompt="The", **defaults, **GREEDY)["choices"] == plain


def test_fields_of_sampling_have_the_effect_of_vllms(
    server: Served, oracle: transformers.LlamaForCausalLM, chat_tokenizer: Path
) -> None:
    tokenizer = open_tokenizer(chat_tokenizer)
    prompt = tokenizer.encode_batch(["The"])[0]

    def continued(**fields: Any) -> Any:
        body = {"prompt": prompt, **GREEDY, **fields}
        (choice,) = server.complete(**body, logprobs=0)["choices"]
        return choice

    plain = continued()
    first = int(log_probabilities(oracle, prompt)[-1].argmax())
    assert continued(logit_bias={"9": 100})["text"].startswith(tokenizer.decode([9] * 5))
    ended = continued(stop_token_ids=[first])
    assert ended["finish_reason"] == "stop"
    assert len(ended["logprobs"]["tokens"]) == 1
    later = continued(stop_token_ids=[first], min_tokens=4)["logprobs"]["tokens"]
    assert len(later) >= 4
    assert tokenizer.decode([first]) not in later[:4]
    text = plain["text"]
    assert continued(stop=[text[0]])["text"] == ""
    assert continued(stop=[text[0]], min_tokens=2)["text"].startswith(text[0])
    eod = {str(tokenizer.eod): 100}
    assert continued(logit_bias=eod)["finish_reason"] == "stop"
    endless = continued(logit_bias=eod, ignore_eos=True)
    assert endless["finish_reason"] == "length"
    assert endless["text"] == tokenizer.decode([tokenizer.eod]) * GREEDY["max_tokens"]
    hidden = continued(logit_bias=eod, ignore_eos=True, skip_special_tokens=True)
    assert hidden["text"] == ""
    # Bias 100 makes token 9 certain; each repetition takes 2 of it, and the first one 4.
    repeated = continued(logit_bias={"9": 100}, presence_penalty=2, frequency_penalty=2)
    assert repeated["text"] == tokenizer.decode([9] * GREEDY["max_tokens"])


def test_a_conversation_has_variables_and_messages_without_content(server: Served) -> None:
    path = "/v1/chat/completions"
    talk = [{"role": "user", "content": "list"}, {"role": "assistant", "content": None}]
    body = {"messages": talk, "temperature": 0, "max_tokens": 4}
    given = server.ask("POST", path, body | {"chat_template_kwargs": {"enable_thinking": False}})
    talk[1]["content"] = ""
    assert given.json["choices"] == server.ask("POST", path, body).json["choices"]
    talk[1]["content"] = "words"
    body |= {"continue_final_message": True}
    (plain,) = server.complete(prompt="[list][words", temperature=0, max_tokens=4)["choices"]
    (continued,) = server.ask("POST", path, body).json["choices"]
    assert continued["message"]["content"] == plain["text"]
    message = server.refusal(path, body | {"add_generation_prompt": True})
    assert message == "add_generation_prompt: true: leave it out with continue_final_message"
    message = server.refusal(path, body | {"chat_template_kwargs": {"messages": []}})
    assert message == "chat_template_kwargs.messages: no variable of the chat template"


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/completions", {"prompt": "The", "max_tokens": 1}),
        ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("PUT", "/api", {"prompts": ["The"], "tokens_to_generate": 1}),
    ],
)
def test_other_requests_go_on_while_one_is_encoded(
    server: Served, monkeypatch: pytest.MonkeyPatch, method: str, path: str, body: dict[str, Any]
) -> None:
    begun, may_go = threading.Event(), threading.Event()
    encode = ServedModel.encode

    def slow(*arguments: Any, **options: Any) -> list[int]:
        begun.set()
        assert may_go.wait(60)
        return encode(*arguments, **options)

    monkeypatch.setattr(ServedModel, "encode", slow)
    statuses: list[int] = []
    thread = threading.Thread(target=lambda: statuses.append(server.ask(method, path, body).status))
    thread.start()
    try:
        assert begun.wait(60)
        assert server.ask("GET", "/healthz").status == 200
    finally:
        may_go.set()
        thread.join()
    assert statuses == [200]


def test_a_conversation_is_the_text_of_its_template(server: Served) -> None:
    messages = [{"role": "user", "content": "list"}, {"role": "assistant", "content": "words"}]
    assert "content" in TEMPLATE
    (plain,) = server.complete(prompt="[list][words] def ", **GREEDY)["choices"]
    body = {"messages": messages, "temperature": 0, "max_completion_tokens": 12}
    body |= {"logprobs": True, "top_logprobs": 2}
    reply = server.ask("POST", "/v1/chat/completions", body).json
    (choice,) = reply["choices"]
    assert choice["message"] == {"role": "assistant", "content": plain["text"]}
    assert reply["object"] == "chat.completion"
    content = choice["logprobs"]["content"]
    assert len(content) == reply["usage"]["completion_tokens"]
    assert all(len(token["top_logprobs"]) == 2 for token in content)
    assert all(bytes(token["bytes"]).decode() == token["token"] for token in content)
    parts = server.ask("POST", "/v1/chat/completions", {**body, "stream": True}).events
    deltas = [part["choices"][0]["delta"] for part in parts]
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta.get("content", "") for delta in deltas) == plain["text"]
    assert parts[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]


def test_the_longest_sequence_fills_the_context(server: Served) -> None:
    """The last new token is not read again, so the sequence has one token more."""
    reply = server.complete(prompt=[7] * 60, max_tokens=5, temperature=1, seed=1, stop=None)
    assert reply["usage"]["total_tokens"] <= 65
    message = server.refusal("/v1/completions", {"prompt": [7] * 60, "max_tokens": 6})
    assert message == "max_tokens: 6: too many after a prompt of 60 tokens; give at most 5"
    open_end = server.complete(prompt=[7] * 60, max_tokens=None)
    assert open_end["usage"]["completion_tokens"] <= 5


def test_text_prompts_begin_as_those_of_transformers(
    tiny: Path, sampled: Path, tmp_path: Path
) -> None:
    folder = write_bos_tokenizer(sorted((sampled / "raw/docs").glob("*.jsonl")), tmp_path)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    with served({"tiny": tiny}, folder) as running:
        options = {"echo": True, "logprobs": 1, **GREEDY}
        (by_text,) = running.complete(prompt="The words", **options)["choices"]
        (by_ids,) = running.complete(prompt=tokenizer.encode("The words"), **options)["choices"]
        (bare,) = running.complete(prompt=tokenizer.encode("The words")[1:], **options)["choices"]
        assert by_text == by_ids
        assert by_text["text"] != bare["text"]
        assert by_text["text"].startswith("The words")
        scores = by_text["logprobs"]
        assert "".join(scores["tokens"]) == by_text["text"]
        assert scores["text_offset"][:2] == [0, 0]
        body = {"prompts": ["The words"], "add_BOS": True, "logprobs": True}
        megatron = running.ask("PUT", "/api", {**body, "tokens_to_generate": 0}).json
        values = scores["token_logprobs"][1 : len(tokenizer.encode("The words"))]
        assert megatron["logprobs"][0] == pytest.approx(values, abs=1e-4)


def test_the_client_of_openai_reads_all_replies(server: Served) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny"]
    request: dict[str, Any] = {"model": "tiny", "prompt": "def ", **GREEDY, "logprobs": 2}
    whole = client.completions.create(**request)
    assert len(whole.choices[0].logprobs.token_logprobs) == whole.usage.completion_tokens
    parts = [*client.completions.create(stream=True, **request)]
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    chat: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
    answer = client.chat.completions.create(max_tokens=5, temperature=0, **chat)
    parts = [*client.chat.completions.create(max_tokens=5, temperature=0, stream=True, **chat)]
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == answer.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="temperature: 200: give a number") as caught:
        client.completions.create(model="tiny", prompt="a", temperature=200)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")
