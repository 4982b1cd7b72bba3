"""gensyn-genrl's GRPO trainer in its own game: a node alone, on its ReasoningGYM data manager.

Settings as ours where both have them; where genrl has a choice, the one that makes it fastest here: all
sequences in one mini-batch and no gradient checkpointing (its defaults: two a mini-batch, with). Its own
reward reads <answer> tags only, which the starter was not taught, so the data set's scorer is asked about
the whole text, as the other programs do.
"""

import json
import time
from pathlib import Path
from typing import Any

import torch
from datasets import disable_progress_bars
from genrl.communication.local.null_comm import NullCommunicationBackend
from genrl.examples.rgym.data import ReasoningGymDataManager
from genrl.examples.rgym.reward_utils import score_answer
from genrl.examples.rgym.rewards import RGRewards
from genrl.game.game_manager import BaseGameManager
from genrl.rewards.reward_manager import DefaultRewardManager
from genrl.rewards.reward_store import RewardFnStore, RoundRewardFnStore
from genrl.state import GameState
from genrl.trainer.grpo_trainer import GRPOLanguageTrainerModule, GRPOTrainerConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from baselines.child import Requests, Work

ROUNDS = 10_000


class TextRewards(RGRewards):
    """The data set's score of a whole text."""

    reward = 0.0

    def cumulative_reward(
        self, completions: list[str], answer: str, metadata: dict[str, Any], include_formatting: bool = False
    ) -> list[float]:
        """Scores of one question's completions."""
        return [float(score_answer(completion, answer, metadata)) for completion in completions]

    def __call__(self, game_state: GameState) -> dict[Any, Any]:
        found = super().__call__(game_state)
        scores = [
            score
            for questions in found.values()
            for nodes in questions.values()
            for row in nodes
            for score in row
        ]
        self.reward = sum(scores) / len(scores)
        return found


class OnRequest(BaseGameManager):
    """Waits before every round until it is asked for, and says how long it took."""

    def serve(self, requests: Requests, rewards: TextRewards) -> None:
        """Play until no more rounds are asked for."""
        self._requests, self._scored = requests, rewards
        self.run_game()

    def end_of_game(self) -> bool:
        """Asked by the game before every round."""
        return self._requests.next() is None

    def run_game_round(self) -> None:
        """One round of genrl's. Raises `RuntimeError` where it went on after its training failed."""
        steps = len(self._losses)
        began = time.perf_counter()
        super().run_game_round()
        seconds = time.perf_counter() - began
        trained = len(self._losses) == steps + 1
        if not trained and self._scored.reward:
            raise RuntimeError("genrl made no step though there was a reward")
        self._requests.answer(seconds, self._scored.reward, trained)

    @property
    def _losses(self) -> list[float]:
        losses: list[float] = self.trainer._metrics["train"]["loss"]
        return losses


def main() -> None:
    """Make rounds until no more are asked for."""
    requests, work = Requests(), Work.read()
    torch.set_num_threads(work.threads)
    disable_progress_bars()
    tasks = [{"name": task["dataset"], "weight": 1.0, "config": task["config"]} for task in work.tasks]
    questions = Path(work.folder) / "questions.yaml"  # JSON is YAML
    questions.write_text(json.dumps({"seed": 7, "size": 100_000, "datasets": tasks}), encoding="utf-8")
    trainer = GRPOLanguageTrainerModule(
        [AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32)],
        GRPOTrainerConfig(
            max_new_tokens=work.new_tokens,
            num_generations=work.completions,
            learning_rate=work.lr,
            minibatch_size=work.groups * work.completions,
            enable_gradient_checkpointing=False,
            top_k=0,
        ),
        processing_class=AutoTokenizer.from_pretrained(work.model, padding_side="left"),
        log_with="none",
        log_dir=work.folder,
    )
    rewards = TextRewards()
    store = RoundRewardFnStore(num_stages=1, reward_fns=[rewards])
    OnRequest(
        max_stage=1,
        max_round=ROUNDS,
        game_state=GameState(round=0, stage=0),
        reward_manager=DefaultRewardManager(RewardFnStore(max_rounds=ROUNDS, reward_fn_stores=[store])),
        trainer=trainer,
        data_manager=ReasoningGymDataManager(
            str(questions), num_train_samples=work.groups, num_transplant_trees=0, seed=7
        ),
        communication=NullCommunicationBackend(),
        run_mode="train",
    ).serve(requests, rewards)


if __name__ == "__main__":
    main()
