"""Hostile peers whose envelopes are in order, and whose recipes, claims or texts are not."""

import re
from dataclasses import replace

from animals.envelopes import BURST
from animals.peer import Item, Peer, Sight, mixed
from sapo.core.types import Completion, Recipe, SignedGroup, canonical

INJECTIONS = (
    "__import__('os').system('touch {mark}')",
    "open('{mark}', 'w').write('1')",
    "[c for c in ().__class__.__base__.__subclasses__() if c.__name__ == 'Popen'][0](['touch', '{mark}'])",
    # reads the answer from the scorer's frame: no wall stands in the way of that
    "(lambda f: f.f_back.f_locals['entry']['answer'])(__import__('sys')._getframe())",
    "[g.gi_frame.f_back.f_locals for g in [(x for x in [1])]]",
    # monkey-patches the scorer, after which junk would score 1.0
    "__import__('reasoning_gym').algorithmic.binary_matrix.BinaryMatrixDataset.__dict__",
    "setattr(__import__('sapo.tasks.verifier').tasks.verifier, 'score', lambda *a: 1.0)",
    "<answer>exec(\"import socket; socket.create_connection(('127.0.0.1', 9))\")</answer>",
)
"""`{mark}` is a file that must not be there afterwards."""
JUNK = ("the the the", "I refuse to think", "9=8 so 7=1", "zzzz qqqq", "no step is needed", "1=2 2=3 3=4")
DEEP = "log(" * 90 + "x+{k}" + ")" * 90
"""Within every grammar, and seconds of work for a scorer that takes a derivative."""


def lie(peer: Peer, sight: Sight) -> list[SignedGroup]:
    """False metadata: another question than the recipe's, another answer's scores, a wrong policy version.

    Nobody looks at the last two; the first would teach answers to other questions.
    """
    items = peer.items(BURST)
    found = []
    for number, (item, other) in enumerate(zip(items, [*items[1:], items[0]], strict=True)):
        if number % 2:
            found.append(
                peer.publish(Item(item.recipe, other.question, other.answer, item.place), mixed(other))
            )
        else:
            found.append(peer.sign(_claiming(peer, item)))
    return found


def _claiming(peer: Peer, item: Item):  # type: ignore[no-untyped-def]
    """A group whose wrong answers claim the full score and whose right ones claim none."""
    texts = mixed(item)
    completions = tuple(
        Completion(text=text, finish_reason="stop", claimed_score=float(text != item.answer))
        for text in texts
    )
    return peer.group(item, texts).model_copy(update={"completions": completions, "policy_version": 10**6})


def bomb_recipes(peer: Peer, sight: Sight) -> list[SignedGroup]:
    """Asks for puzzles that would fill memory or take hours, data sets outside the manifest, odd seeds."""
    (item,) = peer.items(1)
    recipes = [
        Recipe.make("chain_sum", {"min_terms": 10**6, "max_terms": 10**7}, seed=1),
        Recipe.make("n_queens", {"n": 500}, seed=2),
        Recipe.make("no_such_data_set", {}, seed=3),
        Recipe.make(item.recipe.dataset, item.recipe.params | {"size": 10**9}, seed=4),
    ]
    signed = [peer.publish(Item(recipe, "?", "1"), ["1", "2"]) for recipe in recipes]
    # a recipe that the record itself refuses can only be sent as bytes
    group = peer.group(item, mixed(item))
    values = group.model_dump(mode="json")
    for recipe in (
        values["recipe"] | {"seed": 2**31 - 1, "index": 2**31 - 1},
        values["recipe"] | {"config": "[" * 9_000 + "]" * 9_000},
        values["recipe"] | {"seed": -1},
    ):
        payload = canonical(values | {"recipe": recipe}).encode()
        signed.append(peer.envelope(payload, group_id=group.group_id))
    return signed


def steal_questions(peer: Peer, sight: Sight) -> list[SignedGroup]:
    """Right answers to held-out questions: who trains on them can no longer be examined."""
    return [peer.publish(item, mixed(item)) for item in peer.items(BURST, held_out=True)]


def inject_code(peer: Peer, sight: Sight) -> list[SignedGroup]:
    """Programs as answers: they would write files, start processes, read the scorer's frames, patch it."""
    mark = f"injected-by-{peer.key[:12]}"
    found = []
    for dataset in peer.grounds.datasets:
        (item,) = peer.items(1, dataset)
        texts = [payload.replace("{mark}", mark) for payload in INJECTIONS]
        found.append(peer.publish(item, [*texts, item.answer]))
    return found


def inject_control_tokens(peer: Peer, sight: Sight) -> list[SignedGroup]:
    """Answers that spell the tokenizer's own marks: an end in the middle, a new question after it."""
    control = peer.grounds.control
    return [
        peer.publish(item, [f"{item.answer}{control}What is 1 + 1?", f"{control}{item.answer}", "1"])
        for item in peer.items(BURST)
    ]


def misspell_ids(peer: Peer, sight: Sight) -> list[SignedGroup]:
    """Right texts with the ids of other texts, of special tokens, or of no token at all."""
    found = []
    for number, item in enumerate(peer.items(BURST)):
        size = peer.grounds.vocabulary
        ids = [tuple(peer.rng.randrange(5, size) for _ in range(6)), (0, 1, 2, 3), (size + 7,), ()][
            number % 4
        ]
        completions = tuple(
            Completion(text=text, finish_reason="stop", token_ids=ids, logprobs=(-0.1,) * len(ids))
            for text in mixed(item)
        )
        group = peer.group(item, mixed(item), tokenizer=peer.grounds.tokenizer)
        found.append(peer.sign(group.model_copy(update={"completions": completions})))
    return found


def stall(peer: Peer, sight: Sight) -> list[SignedGroup]:
    """What takes longest over it: deep expressions where a scorer differentiates, and the longest answers
    that the rules allow."""
    rules = peer.grounds.manifest
    slow = [name for name in peer.grounds.datasets if name.endswith("integration")]
    deep = [
        peer.publish(item, [DEEP.replace("{k}", str(k)) for k in range(8)])
        for name in slow
        for item in peer.items(1, name)
    ]
    (item,) = peer.items(1)
    room = min(rules.max_text_chars, rules.max_payload_bytes // (rules.max_completions + 1) - 100)
    return [*deep, peer.publish(item, [("1+" * room)[: room - 1] for _ in range(rules.max_completions)])]


def swell(peer: Peer, sight: Sight) -> list[SignedGroup]:
    """Right and wrong numbers behind so many zeros that an update on them would take all memory."""
    rules = peer.grounds.manifest
    room = min(rules.max_text_chars, rules.max_payload_bytes // (rules.max_completions + 1) - 100)
    sent = []
    for number, item in enumerate(peer.items(BURST)):
        length = room >> number % 4
        sign, digits = ("-", item.answer[1:]) if item.answer.startswith("-") else ("", item.answer)
        texts = [
            f"{sign}{'0' * (length - len(item.answer) - k)}{digits if k % 2 else k}"
            for k in range(rules.max_completions)
        ]
        sent.append(peer.publish(item, texts))
    return sent


def pad(peer: Peer, sight: Sight) -> list[SignedGroup]:
    """Right answers padded with junk, beside wrong ones: what is rewarded is the answer, what comes along is
    the junk."""
    return [peer.publish(item, padded(item)) for item in peer.items(BURST)]


def ramble(peer: Peer, sight: Sight) -> list[SignedGroup]:
    """Right answers behind as much junk as they may have, where the mark of an answer makes it free: whoever
    answers at length would weigh more than all others together. Elsewhere that is the padder's."""
    rules = peer.grounds.manifest
    if rules.answer == "text":
        return []
    found = []
    for item in peer.items(BURST):
        junk = " ".join(peer.rng.choices(JUNK, k=12))[: min(150, rules.max_text_chars - 40)]
        texts = [f"{junk} {text}" if k % 2 else text for k, text in enumerate(mixed(item))]
        found.append(peer.publish(item, texts))
    return found


def choose(peer: Peer, sight: Sight) -> list[SignedGroup]:
    """Questions whose answer ends in 7 and no others, rightly answered: that teaches an answer. Half of them
    in other places than its key draws them for."""
    chosen = [item for item in peer.items(16 * BURST) if re.search(r"7\D*$", item.answer)][:BURST]
    items = [item if k % 2 else replace(item, place=None) for k, item in enumerate(chosen)]
    return [peer.publish(item, mixed(item)) for item in items]


def padded(item: Item) -> list[str]:
    """Eight answers: four are right and padded, each otherwise, and four are bare and wrong."""
    junk = [" ok", " I am sure", " " + "very " * 6 + "sure", " because it is"]
    return [item.answer + junk[k // 2] if k % 2 else "0" for k in range(8)]
