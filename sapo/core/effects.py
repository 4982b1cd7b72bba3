"""Settings of the update that can't make a difference, and why. Imports no torch.

In the first step on a batch the old log-probabilities are the policy's own, so every ratio is 1: no clip
acts, and a loss is minus advantage times log-probability, averaged in one way or another.
"""

from collections.abc import Mapping
from typing import Any

from sapo.core.config.load import Config
from sapo.core.config.schema import LearnConfig
from sapo.core.own_code import is_own

FIRST_STEP = "with learn.epochs = 1 every ratio is 1, so no clip acts"
CLIPS = ("clip_low", "clip_high")
GSPO_CLIPS = ("gspo_clip_low", "gspo_clip_high")
OF_MODE = {
    "foreign_floor": "bounded",
    "foreign_late": "positive_late",
    "foreign_ratio_cap": "behaviour",
    "foreign_tis_cap": "f_tis",
    "foreign_tis_kl": "f_tis",
}
"""Settings that one foreign mode alone uses."""
UNUSED: Mapping[str, Mapping[str, str]] = {
    "dr_grpo": {"token_mean": "dr_grpo divides by a constant"},
    "cispo": {"clip_low": "cispo has no lower bound"},
}
"""Settings that one loss alone does not use."""
FOREIGN = [*(name for name in LearnConfig.model_fields if name.startswith("foreign")), "trusted_peers"]
CREDIT = ("foreign_credit", "foreign_top_k")
"""Those of `FOREIGN` that act on own completions, too, with `credit_own`."""


def inert(config: Config) -> dict[str, str]:
    """Keys of section `learn` that don't influence a node's update under this config, with the reason."""
    learn = config.learn
    found: dict[str, str] = {}
    if learn.advantage != "mean_std":
        found["std_floor"] = 'it belongs to learn.advantage = "mean_std"'
    if learn.loss != "dr_grpo":
        found["dr_grpo_length"] = 'it belongs to learn.loss = "dr_grpo"'
    for name, mode in OF_MODE.items():
        if learn.foreign != mode:
            found[name] = f'it belongs to learn.foreign = "{mode}"'
    if learn.foreign_credit != "floor":
        found["foreign_top_k"] = 'it belongs to learn.foreign_credit = "floor"'
    if learn.foreign_credit == "all":
        found["credit_own"] = 'with learn.foreign_credit = "all" there is no credit'
    if learn.loss == "gspo":
        found |= dict.fromkeys(CLIPS, "gspo clips by learn.gspo_clip_low and _high")
    else:
        found |= dict.fromkeys(GSPO_CLIPS, "only gspo clips by it")
    found |= UNUSED.get(learn.loss, {})
    if is_own(learn.loss):
        found = {name: why for name, why in found.items() if name not in CLIPS}
    elif learn.epochs == 1:
        found |= dict.fromkeys((*CLIPS, *GSPO_CLIPS), FIRST_STEP)
    if config.batch.external == 0:
        unused = (name for name in FOREIGN if name not in CREDIT or not learn.credit_own)
        found |= dict.fromkeys(unused, "batch.external = 0: there is nothing foreign in a batch")
    if learn.lr == 0:
        found |= dict.fromkeys(
            {*LearnConfig.model_fields} - {"lr"}, "learn.lr = 0: the policy stays as it is"
        )
    return found


def same_update(config: Config) -> str:
    """The loss that stands for all those that make this config's updates: of two such, the better known."""
    learn = config.learn
    if learn.epochs > 1:
        return learn.loss
    if learn.loss == "cispo":
        return "dapo"
    return "grpo" if learn.loss == "gspo" else learn.loss


def update(config: Config) -> dict[str, Any]:
    """What shapes the updates: section `learn` without inert keys, equal losses under one name."""
    kept = config.learn.model_dump(mode="json") | {"loss": same_update(config)}
    return {name: kept[name] for name in kept.keys() - inert(config).keys()}


def notes(config: Config, before: Config | None = None) -> list[str]:
    """One line for every setting of a node that differs from `before`, or its default, to no effect."""
    learn = config.learn
    old = before.learn if before is not None else LearnConfig()
    why = inert(config)
    found = [
        f"learn.{name} = {getattr(learn, name)} makes no difference: {why[name]}"
        for name in LearnConfig.model_fields
        if name in why and getattr(learn, name) != getattr(old, name)
    ]
    if learn.loss != old.loss and "loss" not in why:
        other = config.model_copy(update={"learn": learn.model_copy(update={"loss": old.loss})})
        if same_update(other) == same_update(config):
            found.append(
                f"learn.loss = {learn.loss} makes the updates of {old.loss}: {FIRST_STEP}; "
                "set learn.epochs = 2 or more"
            )
    return found


def swarm_notes(config: Config) -> list[str]:
    """The notes on all nodes of a swarm, each once."""
    return list(dict.fromkeys(note for name in config.nodes for note in notes(config.for_node(name))))
