"""Step `two-nodes`: rounds of two nodes at once on one GPU against those of one alone."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from baselines.programs import Program, Round, started

from .child import Task
from .memory import watched
from .models import model_of
from .rounds import COUNTED, PYTHON, WARM, add_rounds, config_of, prepared


def run(task: Task) -> None:
    """First one makes rounds while the other waits, then both do."""
    model = model_of(task)
    config = config_of(task, model)
    with ExitStack() as stack:
        seen = stack.enter_context(watched(task.device))
        programs = []
        for _ in range(2):
            work, folder = stack.enter_context(prepared(task, config, model, WARM + 2 * COUNTED))
            programs.append(stack.enter_context(started("ours", work, PYTHON, folder)))
        for one in programs:
            rounds_of(one, WARM)
        alone = rounds_of(programs[0], COUNTED)
        with ThreadPoolExecutor(2) as pool:
            both = list(pool.map(lambda one: rounds_of(one, COUNTED), programs))
    add_rounds(task, alone, "alone")
    for number, rounds in enumerate(both):
        add_rounds(task, rounds, f"both, node {number}")
    rate = sum(one.tokens / one.seconds for rounds in both for one in rounds) / COUNTED
    single = sum(one.tokens / one.seconds for one in alone) / COUNTED
    task.add("tokens a second of both over those of one", "", [rate / single])
    if task.device == "cuda":
        task.add("peak memory of the GPU, both", "MB", [seen.peak_mb - seen.before_mb])
    else:
        task.add("peak memory of the processes, one node", "MB", [one.peak for one in both[0]])


def rounds_of(program: Program, count: int) -> list[Round]:
    """So many rounds, one after the other."""
    return [program.round("all") for _ in range(count)]
