"""A model as lm-eval sees it: `LM` of lm-evaluation-harness over a `Scorer`."""

from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from tokamake.errors import UserError
from tokamake.evaluate.scorer import RowScores, Scorer
from tokamake.inference.chat import chat_prompt
from tokamake.inference.engine import Generation
from tokamake.inference.sampling_settings import Sampling, prompt_seed
from tokamake.inference.text_stream import TextStream

_SAMPLING = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty"}
_OTHERS = {"do_sample", "until", "max_gen_toks"}


class HarnessModel(TemplateLM):
    """A model that lm-eval asks for log-probabilities and continuations."""

    def __init__(self, scorer: Scorer) -> None:
        super().__init__()
        self._scorer = scorer
        self.max_length = scorer.sequence_length

    @property
    def eot_token_id(self) -> int:
        return self._scorer.tokenizer.eod

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context."""
        bos = self._scorer.tokenizer.bos
        return self._scorer.tokenizer.eod if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """Part of the names of caches."""
        return self._scorer.tokenizer.fingerprint

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Tokens of a text, which begin as lm-eval's own model class begins them."""
        if add_special_tokens is False:
            return self._scorer.encode(string)
        return self._scorer.tokenizer.encode_prompt(string)

    def chat_template(self, _: bool | str = False) -> str | None:
        """The chat template, for the names of caches."""
        return self._scorer.tokenizer.chat_template or None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as text."""
        return chat_prompt(
            self._scorer.tokenizer,
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **__: Any
    ) -> list[tuple[float, bool]]:
        scores = self._score([(context, new) for _, context, new in requests], "lm_eval: score")
        for (texts, *_), score in zip(requests, scores, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, tuple(score))
        return [(score.log_probability, score.is_greedy) for score in scores]

    def _score(self, pairs: Sequence[tuple[list[int], list[int]]], label: str) -> list[RowScores]:
        """Score continuations of contexts; contexts that are too long are cut at the beginning."""
        rows = []
        for context, new in pairs:
            if len(new) > self.max_length:
                raise UserError(
                    f"lm_eval: a text of {len(new)} tokens is to be scored at once, but the model "
                    f"reads {self.max_length}; raise sequence_length"
                )
            rows.append(([*context, *new][-self.max_length - 1 :], len(new)))
        return self._scorer.score(rows, label=label)

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
        """Log-probability of each whole text."""
        pairs, owners = [], []
        for number, request in enumerate(requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for window in map(make_disjoint_window, windows):
                pairs.append(window)
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, score in zip(owners, self._score(pairs, "lm_eval: texts"), strict=True):
            totals[owner] += score.log_probability
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
        """Continuations of contexts, each until one of its stop texts."""
        started = []
        for number, request in enumerate(requests):
            context, options = request.args
            started.append(self._generation(context, options, number=number))
        self._scorer.continue_rows(generation for generation, __ in started)
        texts = []
        for request, (__, text) in zip(requests, started, strict=True):
            text.finish()
            texts.append(text.text)
            self.cache_hook.add_partial("generate_until", request.args, text.text)
        return texts

    def _generation(
        self, context: str, options: dict[str, Any], *, number: int
    ) -> tuple[Generation, TextStream]:
        settings = normalize_gen_kwargs(options, 256)
        if unknown := settings.keys() - _SAMPLING - _OTHERS:
            raise UserError(f"lm_eval: generation_kwargs: {', '.join(sorted(unknown))}: not known")
        limit = settings["max_gen_toks"]
        if limit >= self.max_length:
            raise UserError(
                f"lm_eval: a task asks for {limit} new tokens, but the model reads "
                f"{self.max_length}; set max_gen_toks in the task's generation_kwargs"
            )
        tokens = self.tok_encode(context)[-(self.max_length - limit) :] or [self.prefix_token_id]
        until = settings.get("until") or []
        stops = [until] if isinstance(until, str) else until
        # lm-eval decodes new tokens alone, so that a SentencePiece text begins without a space, and
        # leaves special tokens out.
        text = TextStream(self._scorer.tokenizer.decode, [], stops=[*filter(None, stops)])

        def accept(token: int) -> bool:
            if token not in self._scorer.tokenizer.special_tokens:
                text.add(token)
            return not text.is_stopped

        values = {key: settings[key] for key in _SAMPLING & settings.keys()}
        # Without do_sample, lm-eval means the most likely tokens, whatever the temperature.
        values["temperature"] = settings.get("temperature", 1.0) if settings["do_sample"] else 0.0
        seed = prompt_seed(0, context, repetition=number)
        sampling = Sampling(**{"top_k": 0, **values, "seed": seed})
        sampling.check()
        ends = self._scorer.end_tokens
        return Generation(tokens, sampling, limit, ends, accept=accept), text
