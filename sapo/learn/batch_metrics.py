"""What a batch is made of, as metrics: rewards by source and task, staleness."""

from collections.abc import Iterable, Sequence

from sapo.core.types import Batch, BatchGroup


def reward_means(name: str, scores: Iterable[tuple[str, float | None]]) -> dict[str, float]:
    """Mean of (task, score) pairs, all and per task; None is unscorable."""
    by_task: dict[str, list[float]] = {}
    for task, score in scores:
        if score is not None:
            by_task.setdefault(task, []).append(score)
    if not by_task:
        return {}
    every = [score for found in by_task.values() for score in found]
    lists = {name: every} | {f"{name}/{task}": found for task, found in by_task.items()}
    return {series: sum(found) / len(found) for series, found in lists.items()}


def reward_metrics(groups: Sequence[BatchGroup]) -> dict[str, float]:
    """`reward/local`, `/external` and `/training_set` of a batch, all and per task, on raw scores. A node
    whose batch has a choice of its own groups reports `reward/local` over all of them instead."""
    metrics: dict[str, float] = {}
    parts = {
        "reward/local": [group for group in groups if group.source == "local"],
        "reward/external": [group for group in groups if group.source == "external"],
        "reward/training_set": groups,
    }
    for name, part in parts.items():
        metrics |= reward_means(name, ((g.recipe.dataset, s.score) for g in part for s in g.samples))
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
