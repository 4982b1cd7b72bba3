"""TRL's GRPOTrainer, one optimiser step a round: generate, score, update.

Settings as ours where both have them; where TRL has a choice, the one that makes it fastest here: no
gradient checkpointing, no reference model (beta 0), fused AdamW, nothing logged or saved. On a CPU its
weights are of the work's type: bfloat16 ones have no float32 masters, as ours have. On a GPU it computes in
bfloat16 on float32 weights, as is its default. Its questions are drawn before it starts, ours within the
round.
"""

import time
from typing import Any

import reasoning_gym
import torch
from datasets import Dataset
from peft import LoraConfig
from reasoning_gym.utils import extract_answer
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from baselines.child import Requests, Scores, Work, stand_in


class OnRequest(TrainerCallback):
    """Waits before every step until a round is asked for, and says how long it took."""

    def __init__(self, work: Work, requests: Requests) -> None:
        self.work, self.requests = work, requests
        self.scores: Scores = "verifier"
        self.reward, self.began = 0.0, 0.0
        self.tokens, self.generated, self.scored_at = 0, 0.0, 0.0
        self._entries: dict[str, tuple[Any, dict[str, Any]]] = {}
        for question in (question for round in work.rounds for question in round):
            data = reasoning_gym.create_dataset(
                question["dataset"], seed=question["seed"], size=question["index"] + 1, **question["config"]
            )
            self._entries[question["text"]] = (data, data[question["index"]])

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Called before a round's generation."""
        asked = self.requests.next()
        if asked is None:
            raise SystemExit
        self.scores, self.began = asked, time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Called after the optimiser's step."""
        if self.work.device == "cuda":
            torch.cuda.synchronize()
        ended = time.perf_counter()
        stages = {
            "generate": self.generated - self.began,
            "verify": self.scored_at - self.generated,
            "update": ended - self.scored_at,
        }
        self.requests.answer(ended - self.began, self.reward, True, self.tokens, stages)

    def scored(self, prompts: list[Any], completions: list[Any], **columns: Any) -> list[float | None]:
        """The reward function: rows come group by group."""
        self.generated = time.perf_counter()
        self.tokens = sum(map(len, columns.get("completion_ids", ())))
        found = []
        for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            group, k = divmod(row, self.work.completions)
            if self.scores == "verifier":
                data, entry = self._entries[prompt[-1]["content"]]
                text = completion[0]["content"]
                answer = extract_answer(text) if self.work.tagged else text
                found.append(float(data.score_answer(answer, entry)))
            else:
                found.append(stand_in(self.scores, group, k))
        self.reward, self.scored_at = sum(found) / len(found), time.perf_counter()
        return list(found)


def arguments(work: Work) -> GRPOConfig:
    """One generation batch and one optimiser step a round."""
    sequences = work.groups * work.completions
    micro_batch = min(work.micro_batch, sequences)
    return GRPOConfig(
        output_dir=work.folder,
        max_steps=10**9,
        num_generations=work.completions,
        max_completion_length=work.new_tokens,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=sequences // micro_batch,
        learning_rate=work.lr,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        temperature=1.0,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        use_cpu=work.device == "cpu",
        bf16=work.device != "cpu",
        use_vllm=work.vllm_share > 0,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=work.vllm_share or 0.3,
        vllm_max_model_length=1024,
        vllm_importance_sampling_correction=False,  # ours trains on what it sampled, too
        disable_tqdm=True,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
    )


def main() -> None:
    """Make rounds until no more are asked for."""
    requests, work = Requests(), Work.read()
    torch.set_num_threads(work.threads)
    on_request = OnRequest(work, requests)
    rows = [{"prompt": work.conversation(question["text"])} for round in work.rounds for question in round]
    dtype = getattr(torch, work.dtype) if work.device == "cpu" else torch.float32
    GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(work.model, dtype=dtype),
        processing_class=AutoTokenizer.from_pretrained(work.model),
        reward_funcs=on_request.scored,
        args=arguments(work),
        train_dataset=Dataset.from_list(rows),
        callbacks=[on_request],
        peft_config=None if work.lora is None else LoraConfig(**work.lora, task_type="CAUSAL_LM"),
    ).train()


if __name__ == "__main__":
    main()
