"""The starter policy: a small model made here, as no weights can be assumed to be downloadable.

A Llama-architecture model learns, by supervised steps on questions outside the held-out buckets, just enough
to be right now and then. Part of its supervised answers are sentences, which verifiers give little for. Equal
settings share one cached directory. Not Qwen2: transformers 5 loads any `qwen2` tokenizer as Qwen2's own.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from sapo.core.answer_format import AnswerFormat
from sapo.core.config.load import Config
from sapo.core.config.prompt import Prompt, system_prompt
from sapo.core.errors import UserError
from sapo.core.machine import usable
from sapo.core.rng import rng, stream
from sapo.core.types import Question
from sapo.core.user_cache import made_once
from sapo.policy.hf_import import transformers
from sapo.policy.models import save, wrap
from sapo.policy.starter_spec import VARIANTS, Variant, location, variant_of
from sapo.tasks.questions import QuestionStream
from sapo.tasks.workers import TaskWorkers

OWNER = "*starter*"
"""Names the starter's stream of questions; no node or swarm can be called so."""
CHUNK = 512
"""Questions of a batch that are made at once."""
PASSES = 3
"""Times each supervised question is seen."""
SENTENCE = "The answer is {}."
INITIAL_SPREAD = 0.06
"""Standard deviation of fresh weights; with the usual 0.02 a model this narrow takes twice the steps."""
PAD, USER, ASSISTANT, END = "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<|user|>' + message['content'] + '<|assistant|>' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + '<|end|>' }}{% endif %}"
    "{% endfor %}"
)
Progress = Callable[[int, int, str], None]
Pair = tuple[Sequence[int], Sequence[int]]
"""Token ids of a prompt and of the answer to it."""


def prepare(config: Config, workers: TaskWorkers, *, cache: Path, progress: Progress | None = None) -> Path:
    """The cached directory of the config's starter, made now if it is not there yet. `progress(done, total,
    what)` counts supervised steps."""
    target = location(config, cache=cache)
    if target.is_dir():
        return target
    tell = progress or (lambda done, total, what: None)
    return made_once(target, lambda building: _build(config, workers, building, tell))


def solved(config: Config, workers: TaskWorkers) -> Iterator[list[tuple[Question, str]]]:
    """Endless batches of the config's questions with answers, never from a held-out bucket."""
    for round in count():
        questions = QuestionStream(
            workers,
            config.tasks,
            (config.starter.seed, OWNER, OWNER, ""),
            round,
            count=CHUNK,
            held_out=config.rules.held_out,
        ).result()
        answers = workers.answers([question.recipe for question in questions])
        pairs = [(q, a) for q, a in zip(questions, answers, strict=True) if a is not None]
        if not pairs:
            problem = "no data set among them tells its answers, so the starter has nothing to learn from"
            remedy = "add one that does, or set model to a trained one"
            raise UserError("tasks", sorted({task.dataset for task in config.tasks}), problem, remedy)
        yield pairs


def examples(config: Config, workers: TaskWorkers) -> Iterator[tuple[str, str]]:
    """Endless questions of the config's tasks with what is taught: bare answers, and sentences with them."""
    for round, pairs in enumerate(solved(config, workers)):
        random = rng(config.starter.seed, OWNER, "style", round)
        for question, answer in pairs:
            if random.random() < config.starter.bare:
                yield question.text, target_text(answer, config.rules.answer)
            else:
                yield question.text, SENTENCE.format(answer)


def target_text(answer: str, form: AnswerFormat) -> str:
    """A bare answer in the form that `rules.answer` asks for."""
    return {"text": answer, "tags": f"<answer>{answer}</answer>", "boxed": f"\\boxed{{{answer}}}"}[form]


def make_tokenizer(variant: Variant, texts: Sequence[str]) -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on `texts`; no token is partly a number."""
    specials = [PAD, USER, ASSISTANT, END]
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=variant.digits),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(
        texts if variant.vocabulary else [],
        BpeTrainer(
            vocab_size=variant.vocabulary or len(alphabet) + len(specials),
            special_tokens=specials,
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        chat_template=TEMPLATE,
        additional_special_tokens=[USER, ASSISTANT],
    )


BYTE_TOKENS = 256 + 4
"""Tokens of a variant without learned ones: every byte, and the special ones."""


def shape(variant: Variant, vocabulary: int) -> transformers.LlamaConfig:
    """The architecture of a variant with a tokenizer of so many tokens."""
    return transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=variant.hidden,
        intermediate_size=variant.inner,
        num_hidden_layers=variant.layers,
        num_attention_heads=variant.heads,
        num_key_value_heads=variant.heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        initializer_range=INITIAL_SPREAD,
    )


def make_model(
    variant: Variant, tokenizer: transformers.PreTrainedTokenizerFast, seed: int
) -> transformers.LlamaForCausalLM:
    """A fresh model of a variant's shape, the same for the same seed."""
    config = shape(variant, len(tokenizer))
    config.pad_token_id, config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream(seed, OWNER, "weights"))
        model = transformers.LlamaForCausalLM(config)
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    return model


def supervise(
    model: torch.nn.Module, batches: Iterator[Sequence[Pair]], steps: int, lr: float, progress: Progress
) -> float:
    """Supervised steps on the answers' tokens; returns the mean loss of the last tenth, in nats a token."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    warmup = max(1, steps // 20)
    losses = []
    model.train()
    for step, batch in enumerate(islice(batches, steps)):
        share = min((step + 1) / warmup, (steps - step) / (steps - warmup + 1))
        for group in optimiser.param_groups:
            group["lr"] = lr * share
        loss = _loss(model, batch)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        losses.append(float(loss.detach()))
        progress(step + 1, steps, "supervised steps")
    model.eval()
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last)


def shuffled(count: int, size: int, random: Random) -> Iterator[list[int]]:
    """Endless batches of `size` numbers below `count`; each comes once before any comes again."""
    order: list[int] = []
    while True:
        while len(order) < size:
            order += random.sample(range(count), count)
        yield order[:size]
        order = order[size:]


def _loss(model: Any, batch: Sequence[Pair]) -> torch.Tensor:
    width = max(len(prompt) + len(answer) for prompt, answer in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    trained = torch.zeros(len(batch), width, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(batch):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor([*prompt, *answer])
        trained[row, len(prompt) : end] = True
    # Right padding comes after all that is trained, so the causal mask alone keeps it out of sight.
    logits = model(input_ids=ids).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits[trained[:, 1:]], ids[:, 1:][trained[:, 1:]])


def _build(config: Config, workers: TaskWorkers, directory: Path, progress: Progress) -> None:
    starter = config.starter
    variant = VARIANTS[variant_of(config)]
    wanted = -(-starter.steps * starter.batch // PASSES)
    source = examples(config, workers)
    pairs = []
    for done in range(wanted):
        pairs.append(next(source))
        if (done + 1) % 512 == 0 or done + 1 == wanted:
            progress(done + 1, wanted, "questions")
    texts = [text for pair in pairs[:4096] for text in pair]
    tokenizer = make_tokenizer(variant, texts)
    prompt = Prompt(system=system_prompt(config.rules.answer))
    policy = wrap("starter", make_model(variant, tokenizer, starter.seed), tokenizer, prompt=prompt)
    encoded = [
        (policy.encode_prompt(question), policy.encode_completion(answer, "stop"))
        for question, answer in pairs
    ]
    order = shuffled(len(encoded), starter.batch, rng(starter.seed, OWNER, "order"))
    batches = ([encoded[number] for number in numbers] for numbers in order)
    with threads():
        supervise(policy.model, batches, starter.steps, starter.lr, progress)
    save(policy, directory)


@contextmanager
def threads() -> Iterator[None]:
    """Let torch use the machine's cores, four at most, while supervised steps are made."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(4, usable().whole_cores))
    try:
        yield
    finally:
        torch.set_num_threads(before)
