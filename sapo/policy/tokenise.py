"""Token ids of a group under the receiver's vocabulary."""

from dataclasses import dataclass

from sapo.core.types import Completion, Group
from sapo.policy.models import LoadedPolicy


def own_ids(policy: LoadedPolicy, group: Group, completion: Completion) -> tuple[tuple[int, ...], bool]:
    """The ids to train on and whether the text was re-encoded.

    Sent ids are used only if they are of the same vocabulary, inside it, decode to the text, and hold no
    token that ends a completion but a final one where it stopped. Text decides otherwise. So what
    this policy sampled is trained as it was sampled; a peer's text that spells a control token was refused
    (`sapo.peers.admission`).
    """
    ids = completion.token_ids
    if ids is not None and group.tokenizer == policy.fingerprint and _faithful(policy, completion, ids):
        return ids, False
    return policy.encode_completion(completion.text, completion.finish_reason), True


def _faithful(policy: LoadedPolicy, completion: Completion, ids: tuple[int, ...]) -> bool:
    stopped = completion.finish_reason == "stop"
    if stopped and (not ids or ids[-1] not in policy.stop_ids):
        return False
    body = ids[:-1] if stopped else ids
    if not policy.knows(body) or any(token in policy.stop_ids for token in body):
        return False
    return policy.decode(body) == completion.text


def false_ids(policy: LoadedPolicy, group: Group) -> bool:
    """Whether a completion carries ids of this vocabulary that do not decode to its text: no honest node errs
    so.

    A last id that ends a completion elsewhere, but not here, is no lie.
    """
    if group.tokenizer != policy.fingerprint:
        return False
    return any(_lies(policy, completion) for completion in group.completions)


def _lies(policy: LoadedPolicy, completion: Completion) -> bool:
    ids = completion.token_ids
    if ids is None:
        return False
    if not policy.knows(ids):
        return True
    if policy.decode(ids) == completion.text:
        return False
    return completion.finish_reason == "length" or policy.decode(ids[:-1]) != completion.text


@dataclass(frozen=True, slots=True)
class Tokens:
    """A group's ids under the receiver's vocabulary: of its prompt, and `own_ids` of each completion."""

    prompt: tuple[int, ...]
    completions: list[tuple[tuple[int, ...], bool]]

    @classmethod
    def of(cls, policy: LoadedPolicy, group: Group, prompt: tuple[int, ...] | None = None) -> "Tokens":
        """`prompt` are the question's ids, where they are known."""
        ids = policy.encode_prompt(group.question) if prompt is None else prompt
        return cls(ids, [own_ids(policy, group, completion) for completion in group.completions])

    @property
    def longest(self) -> int:
        """Tokens of the group's longest sequence, prompt included."""
        return len(self.prompt) + max(len(ids) for ids, _ in self.completions)
