"""What a batch is made of, as metrics: rewards by source and task, staleness."""

from collections.abc import Callable, Sequence

from sapo.core.types import Batch, BatchGroup


def mean(values: Sequence[float]) -> float | None:
    """The mean, or None of nothing."""
    return sum(values) / len(values) if values else None


def reward_metrics(groups: Sequence[BatchGroup]) -> dict[str, float]:
    """`reward/local`, `/external` and `/training_set`, all and per task, on raw scores (DESIGN 13)."""
    metrics: dict[str, float] = {}
    kinds: dict[str, Callable[[BatchGroup], bool]] = {
        "reward/local": lambda group: group.source == "local",
        "reward/external": lambda group: group.source == "external",
        "reward/training_set": lambda group: True,
    }
    for name, wanted in kinds.items():
        by_task: dict[str, list[float]] = {}
        for group in filter(wanted, groups):
            scores = [sample.score for sample in group.samples if sample.score is not None]
            by_task.setdefault(group.recipe.dataset, []).extend(scores)
        total = mean([score for scores in by_task.values() for score in scores])
        if total is not None:
            metrics[name] = total
        for task, scores in by_task.items():
            value = mean(scores)
            if value is not None:
                metrics[f"{name}/{task}"] = value
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
