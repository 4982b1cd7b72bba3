"""What an update depends on besides weights, optimiser state and batch."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from sapo.core.config.schema import OwnCode, PositiveFloat, PositiveInt, Section

LATER = ("foreign_reference", "foreign_credit", "foreign_top_k")
"""Settings that came later, at whose defaults an update is what it was without them."""


class LearnConfig(Section):
    """The update: everything replay needs besides weights, optimiser state and batch."""

    loss: Literal["dapo", "grpo", "dr_grpo", "cispo", "gspo"] | OwnCode = "dapo"
    """The policy loss, or `module:function` of an installed package ([extending](extending.md)). With
    `epochs` = 1 the ratio is 1 and no clip acts."""
    lr: Annotated[float, Field(ge=0)] = 1e-6
    """0 learns nothing: what is measured is then the effect of selection alone."""
    decay_from: Annotated[int, Field(ge=0)] = 0
    """From this round on the learning rate is lr x sqrt(decay_from / round): steps that were right on the way
    up are too large for staying there. 0 keeps lr."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW's decay of the mean gradient."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """AdamW's decay of the mean squared gradient."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's weight decay."""
    grad_clip: PositiveFloat = 1.0
    """The gradient's norm is cut to this."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio of new to old probability is clipped to at least 1 - clip_low; `cispo` has no lower bound."""
    clip_high: PositiveFloat = 0.28
    """The ratio is clipped to at most 1 + clip_high."""
    gspo_clip_low: Annotated[float, Field(gt=0, lt=1)] = 3e-4
    """The same as `clip_low`, for `gspo`."""
    gspo_clip_high: PositiveFloat = 4e-4
    """`gspo` clips one ratio per sequence, a mean over its tokens, so its bounds are far narrower."""
    dr_grpo_length: PositiveInt = 256
    """`dr_grpo` divides by this many tokens for every completion of the batch, trained or not, however long
    it is: the swarm's max_new_tokens."""
    epochs: PositiveInt = 1
    """Optimiser steps made on one batch; from the second on the ratio leaves 1 and the clip acts."""
    advantage: Literal["centred", "mean_std"] = "centred"
    """`centred`: score minus the group's mean; `mean_std`: that, divided by the group's standard
    deviation."""
    std_floor: PositiveFloat = 1e-3
    """`mean_std` divides by no less than this; above it nothing is added to the deviation."""
    zero_tolerance: Annotated[float, Field(ge=0)] = 1e-6
    """A group whose raw scores spread no wider than this has zero advantage."""
    token_mean: Literal["informative", "all"] = "informative"
    """Whose tokens count in the mean of `dapo` and `cispo`, and whose completions in that of `grpo` and
    `gspo`: informative groups only, or all I + J (preset `paper`)."""
    foreign: Literal["positive", "positive_late", "as_if_own", "bounded", "behaviour"] = "positive"
    """How foreign completions enter the loss: `positive` takes those above their group's mean, which is what
    lasts when peers are late; `positive_late` does so for late groups only. `as_if_own` takes all, as the
    paper does; `bounded` masks improbable tokens; `behaviour` weighs by the ratio to the producing policy."""
    foreign_late: PositiveInt = 2
    """`positive_late`: a group is late if the policy that wrote it is more than so many rounds behind."""
    foreign_floor: Annotated[float, Field(lt=0)] = -7.0
    """`bounded`: foreign tokens below this own log-probability are masked."""
    foreign_weight: Annotated[float, Field(gt=0, le=1)] = 1.0
    """What the loss of foreign tokens is multiplied by, in every mode."""
    foreign_bound: Literal["own", "none"] = "own"
    """What one foreign group may do to a step: no more than an `own` group does, in tokens and in the size of
    its gradient, or, as in the paper, whatever its length and its words do (`none`)."""
    foreign_credit: Literal["all", "floor", "useful"] = "all"
    """Which tokens of a foreign completion are learned: `all`; with `floor` those among the own policy's
    `foreign_top_k`; with `useful` a line, sentence or step as far as it makes what follows it likelier."""
    foreign_top_k: PositiveInt = 50
    """`foreign_credit = "floor"`: a token that so many others are likelier than is not learned."""
    foreign_reference: float | None = None
    """Multiply the loss of a foreign completion by exp(its mean own log-probability - this), at most 1."""
    foreign_ratio_cap: Annotated[float, Field(gt=1)] = 3.0
    """`behaviour`: the ratio to the producer is truncated to [1/cap, cap]."""
    trusted_peers: list[str] = Field(default=[])
    """`behaviour`: public keys whose log-probabilities are believed, and names of this site's own nodes."""
    truncated: Literal["keep", "mask", "zero_reward"] = "keep"
    """What becomes of completions that hit the length limit."""
    micro_batch: PositiveInt | None = None
    """Sequences per forward pass; None takes the whole batch. The gradient is the same."""
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    """`adamw8bit` keeps its moments in 8 bits: a quarter of the memory. Changed in a run, they start anew."""
    activation_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them: less memory, more time."""
    autocast: bool = False
    """Compute in bfloat16 while the weights stay in float32; pays where the hardware has bfloat16."""
    compile: bool = False
    """Compile the model with torch.compile: pays on an accelerator, after a slow first round."""

    @model_serializer(mode="wrap")
    def _without_later_ones(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out later settings at their defaults: digests of configs stay what they were."""
        values: dict[str, Any] = write(self)
        defaults = {name: type(self).model_fields[name].default for name in LATER}
        return {k: v for k, v in values.items() if k not in defaults or v != defaults[k]}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.trusted_peers and self.foreign != "behaviour":
            raise ValueError('trusted_peers has a meaning only with foreign = "behaviour"')
        if self.foreign == "behaviour" and not self.trusted_peers:
            raise ValueError(
                'foreign = "behaviour" needs trusted_peers: a peer must not choose its own denominator'
            )
        if self.compile and self.activation_checkpointing:
            raise ValueError(
                "compile and activation_checkpointing exclude each other: a compiled model chooses by itself "
                "what it computes again"
            )
        return self

    def admits(self, advantage: float, staleness: int) -> bool:
        """Whether `foreign` trains on a foreign completion at all.

        `staleness` is in rounds: the receiver's own less those of the policy that wrote the completion. A
        policy that says it is ahead of the receiver's rounds counts as late: that is its author's word alone.
        """
        if self.foreign == "positive_late" and 0 <= staleness <= self.foreign_late:
            return True
        return self.foreign not in ("positive", "positive_late") or advantage > 0.0
