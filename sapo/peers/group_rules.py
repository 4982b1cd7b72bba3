"""What every group must keep to, whoever receives it and whatever came before: envelope, manifest, bounds.

These checks need no memory, so the archive makes them too: it takes all that any node may take.
"""

from sapo.core.config.manifest import Manifest
from sapo.core.config.schema import FILE
from sapo.core.errors import Refused
from sapo.core.types import MAX_QUESTION, Completion, Group, Received, SignedGroup
from sapo.peers.membership import check, closed_to
from sapo.peers.signing import unseal
from sapo.tasks.holdout import bucket
from sapo.tasks.questions import PATIENT_ATTEMPTS, drawn_by

SPARE_TOKENS = 16
"""Ids that a text may have beyond one per byte, for marks that no text shows at its beginning and end."""
MAX_INDEX = 499
"""The last item of a data set of the library's default size. Nodes draw seeds and ask for item 0; some data
sets make every item up to the one that is asked for."""
LOGPROB_SLACK = 1e-3
"""By which rounding may lift a log-probability above 0."""


def check_size(signed: SignedGroup, manifest: Manifest) -> None:
    """Raise `Refused` for what need not be looked at: `payload_too_large`, `not_member`."""
    if len(signed.payload) > manifest.max_payload_bytes:
        raise Refused("payload_too_large", f"{len(signed.payload)} bytes")
    if closed_to(signed.key, manifest):
        raise Refused("not_member", f"{signed.key} is on no list")


def keeps_to(received: Received, manifest: Manifest) -> Group:
    """The group inside a record, if it keeps to the swarm's rules. Raises `Refused` otherwise.

    Codes: those of `check_size`, `sapo.peers.signing.unseal`, `check_rules`.
    """
    check_size(received.signed, manifest)
    group = unseal(received.signed)
    check_rules(group, manifest, received.timestamp)
    return group


def check_rules(group: Group, manifest: Manifest, timestamp: float) -> None:
    """Raise `Refused` for a signed group, stamped by the bus at `timestamp`, that breaks the swarm's rules.

    Codes: `wrong_swarm`, those of `sapo.peers.membership.check`, `author_kind`, `malformed` (a question
    above `MAX_QUESTION`, an index above `MAX_INDEX`), `recipe` (not in the manifest), `not_drawn`,
    `group_size`, `text_too_long`, `too_many_tokens` (more ids than the text can have), `logprobs` (above 0),
    `held_out`.
    """
    if group.swarm != manifest.swarm:
        raise Refused("wrong_swarm", group.swarm, group)
    check(group, manifest, timestamp)
    if group.kind not in manifest.authors:
        raise Refused("author_kind", f"its author is of kind {group.kind}", group)
    if len(group.question) > MAX_QUESTION:
        raise Refused("malformed", f"a question of {len(group.question)} characters", group)
    if group.recipe.index > MAX_INDEX:
        raise Refused("malformed", f"recipe.index = {group.recipe.index} is above {MAX_INDEX}", group)
    if not manifest.allows(group.recipe):
        raise Refused("recipe", f"{group.recipe.dataset} with these parameters is not in the manifest", group)
    size = len(group.completions)
    if not manifest.min_completions <= size <= manifest.max_completions:
        raise Refused("group_size", f"{size} completions", group)
    for completion in group.completions:
        _check_completion(completion, group, manifest)
    picked = manifest.questions == "drawn" and not group.recipe.dataset.startswith(FILE)
    if picked and not drawn_by(group, PATIENT_ATTEMPTS):
        raise Refused("not_drawn", "its author's key and round draw another question", group)
    # the claimed question is compared with the regenerated one before use, so its bucket is the true one
    if bucket(group.question, manifest.salt) < manifest.held_out:
        raise Refused("held_out", "nobody may train on this question", group)


def _check_completion(completion: Completion, group: Group, manifest: Manifest) -> None:
    if len(completion.text) > manifest.max_text_chars:
        raise Refused("text_too_long", f"{len(completion.text)} characters", group)
    ids, most = len(completion.token_ids or ()), len(completion.text.encode(errors="surrogatepass"))
    if ids > most + SPARE_TOKENS:
        raise Refused("too_many_tokens", f"{ids} ids for {most} bytes", group)
    highest = max(completion.logprobs or (0.0,))
    if highest > LOGPROB_SLACK:
        raise Refused("logprobs", f"a log-probability of {highest:g}", group)
