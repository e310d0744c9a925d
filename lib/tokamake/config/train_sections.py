"""Sections of `train`: dropout, FIM, masking, trackers, bad steps, loss scaling."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from tokamake.config.fields import Settings, plug_in


class DropoutSettings(Settings):
    """Rates of dropout while training, 0 by default. Its masks follow from the seed and the numbers
    of samples: they are the same at every layout, with recomputation and after a restart."""

    hidden: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Rate of the outputs of attention and MLP, before they enter the residual stream."""
    attention: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Rate of the weights of attention. Attention is slower then, and its memory grows with the
    square of sequence_length."""
    embedding: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Rate of the embedding. Megatron uses its --hidden-dropout here, too."""

    @property
    def rates(self) -> tuple[float, float, float]:
        """Rates of hidden states, weights of attention, and the embedding."""
        return self.hidden, self.attention, self.embedding


class RouterSettings(Settings):
    """Routers of mixtures of experts: their losses, biases, and the capacity of experts. The
    gradients of the training have the losses; the records have them apart. Each is the mean over
    the rows of the global batch, the same at every layout, and the layers add up."""

    balance_coefficient: Annotated[float, Field(ge=0)] = 0.01
    """Factor of the loss that balances the load of experts, for each row: the number of experts
    times the sum, over experts, of share of the choices times mean probability. That loss is 1 if
    all experts are equally likely."""
    z_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Factor of the z loss, which keeps the scores of routers small: the mean square of their
    log-sum-exp. OLMoE uses 0.001."""
    bias_update_rate: Annotated[float, Field(ge=0)] = 0.001
    """Families whose routers have a bias, such as deepseek_v3: what each step adds to the bias of
    an expert with fewer tokens than the mean, and takes from others. DeepSeek-V3 uses 0.001, and 0
    for its last tokens."""
    capacity_factor: Annotated[float, Field(ge=0.001, le=1000)] | None = None
    """Tokens of a row that an expert takes while the model trains, relative to an even share: the
    first ones that choose it. It drops later ones, which get no result and no gradient of this
    expert. Evaluation and generation drop none. Empty: no token is dropped."""


class MTPSettings(Settings):
    """Losses of layers that predict further tokens (MTP), for models with
    num_nextn_predict_layers. The gradients of the training have them; the records of losses have
    them apart."""

    loss_scaling_factor: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.3
    """Factor of the mean of these losses, one for each layer: Megatron's
    --mtp-loss-scaling-factor, 0.1 there. DeepSeek-V3 uses 0.3 for its first 10 trillion tokens,
    then 0.1. 0: the layers get no gradients, and the records still have their losses."""


class FimSettings(Settings):
    """Fill-in-the-middle (FIM): rearrange documents so that the model learns to fill gaps."""

    rate: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of documents to rearrange; 0 turns fill-in-the-middle off."""
    spm_rate: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of the rearranged documents in the order suffix, prefix, middle (SPM). The rest has
    the order prefix, suffix, middle (PSM)."""
    split_token: str = ""
    """Special token between fragments of a document, for example between files of a repository.
    Empty: documents have no fragments."""
    fragment_rate: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of fragments to rearrange, each fragment separately."""
    prefix: str = "<fim_prefix>"
    """Special token before the prefix."""
    suffix: str = "<fim_suffix>"
    """Special token before the suffix."""
    middle: str = "<fim_middle>"
    """Special token before the middle."""


class MaskingSettings(Settings):
    """How samples of the objectives masked and span_corruption are masked: whole words, chosen by
    the seed and the number of the sample alone."""

    probability: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Share of the tokens of a sample to mask."""
    max_ngram: Annotated[int, Field(ge=1, le=1000)] | None = None
    """Most words that are masked as one. Empty: 3 for masked, where n words have a probability in
    proportion to 1 / n, and 10 for span_corruption, where it is geometric, with a mean of 4.5."""
    short_sequence_probability: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of the samples that are shorter than possible."""
    sentence_order: bool = True
    """masked: divide each sample in two parts, and swap them in half of the samples, so that the
    model also learns the order of sentences. The loss of both is their sum: random weights begin at
    ln(vocabulary) + ln 2. false: samples of one part."""
    decoder_sequence_length: Annotated[int, Field(ge=3)] | None = None
    """span_corruption: tokens of the decoder. Empty: enough for every sample. `index` refuses a
    number that is too small for a sample of the run."""


TRACKERS = "train/trackers"


def _once(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        raise ValueError("a name occurs twice; keep one")
    return names


class TrackerSettings(Settings):
    """Experiment trackers. They get the records of metrics.jsonl."""

    names: Annotated[tuple[Annotated[str, plug_in(TRACKERS)], ...], AfterValidator(_once)] = ()
    """Names of files in lib/tokamake/train/trackers, such as [wandb]. Empty: none."""
    project: Annotated[str, Field(min_length=1)] = "tokamake"
    """Project of the run; MLflow calls it experiment."""
    online: bool = False
    """Send records to the tracker's server while the run trains. Environment variables of the
    tracker name the server. false: keep them in the run's folder `training/trackers`."""


class BadStepSettings(Settings):
    """Action after a step with bad numbers, the same on all ranks."""

    not_finite: Literal["stop", "skip", "rewind", "lower_rate"] = "stop"
    """Action if the loss or the gradient norm is NaN or infinite. Such a step never updates the
    weights. stop: end the run with an error. skip: continue with the next step. rewind: go back to
    the newest checkpoint that is whole, and leave out the data of the bad step. lower_rate: skip
    the step, and multiply the learning rate of all later steps by rate_factor."""
    spike: Literal["ignore", "journal", "stop", "skip", "rewind", "lower_rate"] = "journal"
    """Action if the loss or the gradient norm is far above the values of the last good steps.
    ignore: do not look for spikes. journal: note the step in events.jsonl, and update the weights
    as usual. stop, skip, rewind and lower_rate do not update the weights; see not_finite. The back
    end deepspeed cannot skip or lower_rate here."""
    spike_threshold: Annotated[float, Field(gt=0)] = 10.0
    """Distance above the median that makes a spike, in robust standard deviations: 1.4826 times the
    median absolute deviation."""
    spike_window: Annotated[int, Field(ge=4)] = 128
    """Number of good steps to compare with. There are no spikes before that many good steps."""
    rate_factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Factor of the learning rate for lower_rate."""
    budget: Annotated[int, Field(ge=0)] = 10
    """Number of steps of the whole run that may be skipped, rewound or followed by a lower rate.
    The next bad step ends the run with an error."""
    recompute: bool = False
    """Compute a bad step again, without an update, and note in events.jsonl whether its numbers are
    bad again: `reproducible` (by the data or the weights) or `transient` (a fault of the hardware).
    Needs the back end native."""


class LossScalingSettings(Settings):
    """Loss scaling of fp16, dynamic by default. Other precisions have none."""

    static: bool = False
    """Keep initial_scale, as Megatron's --loss-scale does. A step whose gradients overflow is
    skipped."""
    initial_scale: Annotated[float, Field(ge=1, le=2**32)] = 2.0**16
    """Loss scale of the first step."""
    min_scale: Annotated[float, Field(gt=0, le=2**32)] = 1.0
    """Lowest loss scale. Gradients that overflow there are a bad step, see on_bad_step."""
    window: Annotated[int, Field(ge=1)] = 1000
    """Steps in a row without overflow after which the scale doubles."""
    hysteresis: Annotated[int, Field(ge=1)] = 1
    """Number of overflows until the scale is halved: the earlier ones only skip their step. Counts
    from the last time that the scale has doubled, as in Megatron and DeepSpeed, which use 2."""

    @model_validator(mode="after")
    def _in_order(self) -> "LossScalingSettings":
        if self.min_scale > self.initial_scale:
            raise ValueError(
                f"min_scale: {self.min_scale:g}: is above initial_scale {self.initial_scale:g}; "
                "lower it"
            )
        for name in ("min_scale", "window", "hysteresis") if self.static else ():
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                raise ValueError(f"{name}: {value:g}: has no effect on a static scale; remove it")
        return self


def _check_ranges(ranges: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    for first, last in ranges:
        if not 1 <= first <= last:
            raise ValueError(
                f"[{first}, {last}]: give the first and the last step, from 1, as in [[120, 124]]"
            )
    return ranges


StepRanges = Annotated[tuple[tuple[int, int], ...], AfterValidator(_check_ranges)]
"""Ranges of steps: the first and the last step of each, numbered from 1."""
