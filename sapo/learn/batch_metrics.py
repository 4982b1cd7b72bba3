"""What a batch is made of, as metrics: rewards by source and task, staleness."""

from collections.abc import Callable, Iterable, Sequence

from sapo.core.types import Batch, BatchGroup


def mean(values: Sequence[float]) -> float | None:
    """The mean, or None of nothing."""
    return sum(values) / len(values) if values else None


def reward_means(name: str, scores: Iterable[tuple[str, float | None]]) -> dict[str, float]:
    """Mean of (task, score) pairs, all and per task; None is unscorable."""
    by_task: dict[str, list[float]] = {}
    for task, score in scores:
        if score is not None:
            by_task.setdefault(task, []).append(score)
    if not by_task:
        return {}
    every = mean([score for found in by_task.values() for score in found])
    means = {name: every} | {f"{name}/{task}": mean(found) for task, found in by_task.items()}
    return {series: value for series, value in means.items() if value is not None}


def reward_metrics(groups: Sequence[BatchGroup]) -> dict[str, float]:
    """`reward/local`, `/external` and `/training_set` of a batch, all and per task, on raw scores.

    A node whose batch has a choice of its own groups reports `reward/local` over all of them instead.
    """
    metrics: dict[str, float] = {}
    kinds: dict[str, Callable[[BatchGroup], bool]] = {
        "reward/local": lambda group: group.source == "local",
        "reward/external": lambda group: group.source == "external",
        "reward/training_set": lambda group: True,
    }
    for name, wanted in kinds.items():
        some = filter(wanted, groups)
        metrics |= reward_means(name, ((g.recipe.dataset, s.score) for g in some for s in g.samples))
    return metrics


def source_metrics(batch: Batch) -> dict[str, float]:
    """How much of a batch is foreign, how old that is in seconds, and how much of it was re-encoded."""
    external = [group for group in batch.groups if group.source == "external"]
    metrics = {"sampler/external": float(len(external))}
    if batch.groups:
        metrics["share/external"] = len(external) / len(batch.groups)
    if external:
        metrics["staleness/mean_s"] = sum(group.age_s for group in external) / len(external)
        metrics["staleness/max_s"] = max(group.age_s for group in external)
        samples = [sample for group in external for sample in group.samples]
        metrics["share/retokenised"] = sum(sample.retokenised for sample in samples) / len(samples)
    return metrics
