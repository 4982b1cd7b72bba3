"""The zoo: hostile peers, one function each, for the tests and for benchmarks/hostile.py."""

from animals.answers import (
    bomb_recipes,
    choose,
    inject_code,
    inject_control_tokens,
    lie,
    misspell_ids,
    pad,
    ramble,
    stall,
    steal_questions,
    swell,
)
from animals.crowd import crowd, spam
from animals.envelopes import (
    amplify,
    burn,
    equivocate,
    forge,
    garbage,
    giant,
    hog,
    replay,
    sign_weakly,
    squat,
    travel,
)
from animals.peer import Animal, Grounds, Item, Peer, Sight
from animals.planters import dawdle, miscount, plant
from animals.thieves import copy, copy_masked, copy_nearly

ZOO: dict[str, Animal] = {
    "garbage": garbage,
    "giant": giant,
    "liar": lie,
    "copier": copy,
    "near copier": copy_nearly,
    "masked copier": copy_masked,
    "spammer": spam,
    "replayer": replay,
    "forger": forge,
    "squatter": squat,
    "equivocator": equivocate,
    "recipe bomber": bomb_recipes,
    "held-out seeder": steal_questions,
    "code injector": inject_code,
    "control-token injector": inject_control_tokens,
    "token-id liar": misspell_ids,
    "slow-verification attacker": stall,
    "time traveller": travel,
    "padder": pad,
    "rambler": ramble,
    "planter": plant,
    "miscounter": miscount,
    "dawdler": dawdle,
    "chooser": choose,
    "giant learner": swell,
    "admission burner": burn,
    "byte hog": hog,
    "archive amplifier": amplify,
    "small-order signer": sign_weakly,
    "two thousand identities": crowd,
}
"""By the name they go by in docs/threat-model.md. The zip bomb lives on Kafka alone (`animals.bombs`)."""

__all__ = ["ZOO", "Animal", "Grounds", "Item", "Peer", "Sight"]
