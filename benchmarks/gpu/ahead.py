"""Step `ahead`: rounds with generation beside the update against rounds without, in turns."""

from contextlib import ExitStack

from baselines.programs import started

from .child import Task
from .machine import missing
from .models import model_of
from .rounds import COUNTED, PYTHON, WARM, add_rounds, config_of, prepared

NAMES = {0: "one after the other", 1: "ahead"}


def run(task: Task) -> None:
    """Both ways take turns; each is a process of its own."""
    model = model_of(task)
    vllm = not missing(["vllm"])
    task.facts["engine"] = "vllm" if vllm else "transformers"
    with ExitStack() as stack:
        ways = {}
        for ahead in NAMES:
            config = config_of(task, model, f"generate.ahead={ahead}", vllm=vllm)
            work, folder = stack.enter_context(prepared(task, config, model, WARM + COUNTED))
            ways[ahead] = stack.enter_context(started("ours", work, PYTHON, folder))
        turns = [{ahead: one.round("all") for ahead, one in ways.items()} for _ in range(WARM + COUNTED)]
    for ahead, name in NAMES.items():
        add_rounds(task, [turn[ahead] for turn in turns[WARM:]], name)
    gains = [turn[0].seconds / turn[1].seconds for turn in turns[WARM:]]
    task.add("rounds ahead are so many times faster", "", gains)
