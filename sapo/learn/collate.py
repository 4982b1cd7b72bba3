"""From a batch of records to tensors: which completions are trained, and where each token stands.

Masks come from lengths, never from ids. Rows are padded on the right only. Where the model allows it a
prompt is computed once for all completions that follow it, and equal completions once altogether: several
sequences then share a row, kept apart by a four-dimensional attention mask and their own positions. What all
prompts begin with (a system turn, examples) may be left out of all rows, to be computed once for the batch.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor
from torch.nn import functional

from sapo.core.config.load import LearnConfig
from sapo.core.types import Batch, BatchGroup, Sample
from sapo.learn.batch_metrics import reward_means

BLOCK_TOKENS = 1024
"""A shared prompt and its completions take no longer a row than this (attention grows with its square)."""
LEAST_BEGINNING = 64
"""Tokens that all prompts must begin with for a pass of their own to pay."""


@dataclass(frozen=True, slots=True)
class Row:
    """One completion that is trained: prompt plus completion, and what the loss needs to know of it."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    advantage: float
    external: bool
    behaviour: tuple[float, ...] | None = None
    """The sampler's log-probabilities, one per trained token: the engine's own, or a trusted peer's."""
    group: int = 0
    """Position of its group in the batch."""
    rate: float = 0.0
    """The mean score of the batch's own answers to its task, or to all tasks, where it is a foreign one."""

    @property
    def start(self) -> int:
        """Offset of the first trained token."""
        return self.loss_mask.index(1)

    @property
    def trained(self) -> list[int]:
        """Offsets of the trained tokens."""
        return [offset for offset, flag in enumerate(self.loss_mask) if flag]


@dataclass(frozen=True, slots=True)
class Selection:
    """The rows that reach the forward pass, and what else counts in the normaliser."""

    rows: list[Row]
    untrained: list[Row]
    """Own completions that are not trained: measured, so that a policy that only repeats itself is seen."""
    completions: float
    """All of the batch, whether trained or not."""
    silent_tokens: float
    """Tokens of zero-advantage groups that count in the denominator (`token_mean = "all"`)."""
    silent_sequences: float
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A micro-batch: B rows of T tokens, holding S sequences with at most W trained tokens each.

    Every row goes on from `beginning` [1, K], which is empty where nothing is left out.
    Of the logits only the last `keep` columns are needed, and of the flattened [B, keep] only the entries
    `places` [P]. The n-th distinct trained token, `targets` [N], is predicted at the `rows` [N]-th of these.
    `index` [S, W] maps a sequence's trained token to one of the N, where `mask` [S, W]. `behaviour` [S, W]
    holds values where `known` [S]. `groups` [S] are positions in the batch, `sequences` [S] the rows
    that all of it was made of.
    """

    beginning: Tensor
    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    keep: int
    places: Tensor
    rows: Tensor
    targets: Tensor
    index: Tensor
    mask: Tensor
    advantages: Tensor
    external: Tensor
    behaviour: Tensor
    known: Tensor
    groups: tuple[int, ...]
    sequences: tuple[Row, ...]


@dataclass(slots=True)
class _Block:
    """A prompt and the completions that share it."""

    trunk: tuple[int, ...]
    branches: list[tuple[int, ...]]

    @property
    def length(self) -> int:
        return len(self.trunk) + sum(map(len, self.branches))


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a sequence stands: row, column of its prompt, column of its completion. The prompt's column is
    below 0 where tokens before it were left out."""

    row: int
    trunk: int
    branch: int


def select(batch: Batch, learn: LearnConfig) -> Selection:
    """The completions to train on: those of informative groups that the settings admit.

    With `learn.foreign_bound` no foreign group counts for more completions or silent tokens than an own one.
    Zero-advantage groups are not trained. Completions that are unscorable, masked for being
    truncated, or not admitted by the foreign mode leave both the numerator and the denominator.
    """
    rows: list[Row] = []
    untrained: list[Row] = []
    silent = [0.0, 0.0]
    completions: float = 0
    tokens, count = _usual(batch, learn)
    dropped = {"truncated": 0, "foreign": 0}
    missing = 0
    rates = _own_rates(batch)
    for group in batch.groups:
        rate = rates.get(f"/{group.recipe.dataset}", rates.get("", 0.0))
        quiet = [0, 0]
        for sample in group.samples:
            reason = _excluded(sample, group, learn, batch.round)
            if reason in (None, "foreign") and group.informative:
                missing += _trusted(group, learn) and sample.behaviour_logprobs is None
            if reason is not None:
                dropped[reason] = dropped.get(reason, 0) + 1
            elif group.informative:
                rows.append(_row(sample, group, learn, rate))
                continue
            elif learn.token_mean == "all":
                quiet[0] += sum(sample.loss_mask)
                quiet[1] += 1
            if group.source == "local" and any(sample.loss_mask):
                untrained.append(_row(sample, group, learn))
        foreign = group.source == "external"
        silent[0] += min(quiet[0], tokens) if foreign else quiet[0]
        silent[1] += min(quiet[1], count) if foreign else quiet[1]
        completions += min(len(group.samples), count) if foreign else len(group.samples)
    metrics = _shares(batch) | {
        "learn/sequences": float(len(rows)),
        "learn/excluded_truncated": float(dropped["truncated"]),
        "learn/excluded_foreign": float(dropped["foreign"]),
    }
    if learn.believes:
        metrics["learn/behaviour_missing"] = float(missing)
    return Selection(rows, untrained, completions, silent[0], silent[1], metrics)


def _usual(batch: Batch, learn: LearnConfig) -> tuple[float, float]:
    """Tokens and completions of the batch's own groups, in the mean: what a foreign one may count for."""
    own = [group.samples for group in batch.groups if group.source == "local"]
    if learn.foreign_bound == "none" or not own:
        return math.inf, math.inf
    tokens = sum(sum(sample.loss_mask) for samples in own for sample in samples)
    return tokens / len(own), sum(map(len, own)) / len(own)


def _excluded(sample: Sample, group: BatchGroup, learn: LearnConfig, round: int) -> str | None:
    if sample.outcome == "unscorable" or not any(sample.loss_mask):
        return "empty"
    if learn.truncated == "mask" and sample.finish_reason == "length":
        return "truncated"
    told = _trusted(group, learn) and sample.behaviour_logprobs is not None
    stale = round - group.producer_version
    if group.source == "external" and not learn.admits(sample.advantage, stale, told=told):
        return "foreign"
    return None


def _trusted(group: BatchGroup, learn: LearnConfig) -> bool:
    """Whether a foreign group's log-probabilities are used."""
    return (
        group.source == "external"
        and learn.believes
        and bool({group.producer, group.producer_key} & {*learn.trusted_peers})
    )


def _own_rates(batch: Batch) -> dict[str, float]:
    """The mean score of own answers under ``""``, and of those to a data set under "/" and its name."""
    own = [group for group in batch.groups if group.source == "local"]
    return reward_means("", ((g.recipe.dataset, s.score) for g in own for s in g.samples))


def _row(sample: Sample, group: BatchGroup, learn: LearnConfig, rate: float = 0.0) -> Row:
    told = group.source == "local" or _trusted(group, learn)
    return Row(
        token_ids=sample.token_ids,
        loss_mask=sample.loss_mask,
        advantage=sample.advantage,
        external=group.source == "external",
        behaviour=sample.behaviour_logprobs if told else None,
        group=group.position,
        rate=rate if group.source == "external" else 0.0,
    )


def _shares(batch: Batch) -> dict[str, float]:
    """Shares of own completions, and groups that carry no advantage."""
    own = [sample for group in batch.groups if group.source == "local" for sample in group.samples]
    metrics = {
        "learn/groups": float(len(batch.groups)),
        "learn/groups_zero_advantage": float(sum(not group.informative for group in batch.groups)),
    }
    if own:
        metrics["learn/truncated"] = sum(s.finish_reason == "length" for s in own) / len(own)
        metrics["learn/unscorable"] = sum(s.outcome == "unscorable" for s in own) / len(own)
    return metrics


def collate(
    rows: Sequence[Row],
    *,
    micro_batch: int | None = None,
    shared: bool = False,
    beginning: tuple[int, ...] = (),
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    longest: int | None = None,
) -> list[Chunk]:
    """Micro-batches of at most `micro_batch` sequences, and of the tokens of so many of the longest own one,
    which has `longest` if it is not among them.

    So peers whose answers are longer than this node's need no more memory than it does. A sequence that is
    longer than that by itself is alone.
    `shared` computes common prompts and equal sequences once (see `sapo.learn.logprobs.shares_prompts`), and
    keeps a prompt's completions in as few micro-batches as can be; `dtype` is the model's, in which its
    attention mask is then given. `beginning`, which all prompts must begin with, is left out of the rows.
    Otherwise every sequence has its own row, sorted by length so that micro-batches pad little.
    """
    size = micro_batch or max(len(rows), 1)
    if shared:
        portions = _portions(rows, size)
    else:
        ordered = sorted(rows, key=lambda row: len(row.token_ids))
        portions = [ordered[i : i + size] for i in range(0, len(ordered), size)]
    if micro_batch is not None:
        most = size * (longest_own(rows) if longest is None else longest)
        portions = [part for portion in portions for part in _within(portion, most)]
    return [_chunk(portion, beginning, shared, torch.device(device), dtype) for portion in portions]


def has_own_prompt(tokens: int, shared: bool) -> bool:
    """Whether the prompt of a completion is computed for it alone; both have so many tokens together."""
    return not shared or tokens > BLOCK_TOKENS


def size_of(one: Row | Sample, shared: bool) -> int:
    """Tokens that a completion takes in an update: its prompt's, too, where that is computed for it alone."""
    alone = has_own_prompt(len(one.token_ids), shared)
    return len(one.token_ids) if alone else sum(one.loss_mask)


def costs(batch: Batch, learn: LearnConfig, *, shared: bool = True) -> dict[int, int]:
    """Tokens that groups of a batch have to learn from, by position; `shared` as for `collate`."""
    return {
        group.position: sum(
            size_of(one, shared) for one in group.samples if _excluded(one, group, learn, batch.round) is None
        )
        for group in batch.groups
    }


def common_beginning(rows: Sequence[Row]) -> tuple[int, ...]:
    """What all prompts begin with, where that pays; never a whole prompt, whose last token predicts."""
    prompts = {row.token_ids[: row.start] for row in rows}
    if len(prompts) < 2:
        return ()
    first, last = min(prompts), max(prompts)
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))
    length = min(alike, min(map(len, prompts)) - 1)
    return first[:length] if length >= LEAST_BEGINNING else ()


def longest_own(rows: Sequence[Row]) -> int:
    """Tokens of the longest own sequence; where there is none, of the longest."""
    own = [len(row.token_ids) for row in rows if not row.external]
    return max(own or [len(row.token_ids) for row in rows], default=0)


def _within(rows: Sequence[Row], tokens: int) -> list[list[Row]]:
    """Rows in parts that have at most so many tokens, or one row."""
    parts: list[list[Row]] = [[]]
    used = 0
    for row in rows:
        if parts[-1] and used + len(row.token_ids) > tokens:
            parts.append([])
            used = 0
        parts[-1].append(row)
        used += len(row.token_ids)
    return parts


def _portions(rows: Sequence[Row], size: int) -> list[list[Row]]:
    """Rows by prompt, put whole into the first portion of `size` that has room; only larger ones are cut."""
    by_prompt: dict[tuple[int, ...], list[Row]] = {}
    for row in rows:
        by_prompt.setdefault(row.token_ids[: row.start], []).append(row)
    pieces = [alike[i : i + size] for alike in by_prompt.values() for i in range(0, len(alike), size)]
    portions = _first_fit([len(piece) for piece in pieces], size)
    return [[row for number in portion for row in pieces[number]] for portion in portions]


def _chunk(
    rows: Sequence[Row], beginning: tuple[int, ...], shared: bool, device: torch.device, dtype: torch.dtype
) -> Chunk:
    lines, places = _arrange(rows, shared, len(beginning))
    width = max(sum(block.length for block in line) for line in lines)
    ids, positions, attention = _inputs(lines, width, shared, dtype)
    if beginning:
        positions += len(beginning)
        attention = functional.pad(attention, (len(beginning), 0))
    where, numbers, targets, index = _targets(rows, places)
    first = min(column for _, column in where)
    keep = width - first
    flat = [row * keep + column - first for row, column in where]
    behaviour = [row.behaviour or (0.0,) * sum(row.loss_mask) for row in rows]
    return Chunk(
        beginning=torch.tensor([beginning], dtype=torch.long, device=device),
        input_ids=ids.to(device),
        attention_mask=attention.to(device),
        position_ids=positions.to(device),
        keep=keep,
        places=torch.tensor(flat, device=device),
        rows=torch.tensor(numbers, device=device),
        targets=torch.tensor(targets, device=device),
        index=torch.tensor(_padded(index, 0), device=device),
        mask=torch.tensor(_padded([[True] * len(entry) for entry in index], False), device=device),
        advantages=torch.tensor([row.advantage for row in rows], dtype=torch.float32, device=device),
        external=torch.tensor([row.external for row in rows], device=device),
        behaviour=torch.tensor(_padded(behaviour, 0.0), dtype=torch.float32, device=device),
        known=torch.tensor([row.behaviour is not None for row in rows], device=device),
        groups=tuple(row.group for row in rows),
        sequences=tuple(rows),
    )


def _padded(lists: Iterable[Sequence], value: object) -> list[list]:
    items = [list(entry) for entry in lists]
    width = max(map(len, items))
    return [entry + [value] * (width - len(entry)) for entry in items]


def _split(row: Row, skipped: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Prompt without the tokens that are left out, and the part of the completion that is input. The last
    trained token is a target only."""
    end = len(row.loss_mask) - 1 - row.loss_mask[::-1].index(1)
    return row.token_ids[skipped : row.start], row.token_ids[row.start : end]


def _arrange(rows: Sequence[Row], shared: bool, skipped: int) -> tuple[list[list[_Block]], list[_Place]]:
    """Lines of blocks without the prompts' first tokens, and every sequence's place among them."""
    blocks: list[_Block] = []
    open_block: dict[tuple[int, ...], int] = {}
    seen: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, int]] = {}
    homes: list[tuple[int, int]] = []
    for row in rows:
        trunk, branch = _split(row, skipped)
        home = seen.get((trunk, branch)) if shared else None
        if home is None:
            number = open_block.get(trunk) if shared else None
            if number is None or blocks[number].length + len(branch) > BLOCK_TOKENS:
                number = open_block[trunk] = len(blocks)
                blocks.append(_Block(trunk, []))
            home = seen[trunk, branch] = (number, len(blocks[number].branches))
            blocks[number].branches.append(branch)
        homes.append(home)
    lines = _packed(blocks) if shared else [[number] for number in range(len(blocks))]
    at: dict[tuple[int, int], _Place] = {}
    for row_number, line in enumerate(lines):
        column = 0
        for number in line:
            trunk_column, column = column, column + len(blocks[number].trunk)
            for k, branch in enumerate(blocks[number].branches):
                at[number, k] = _Place(row_number, trunk_column - skipped, column)
                column += len(branch)
    return [[blocks[number] for number in line] for line in lines], [at[home] for home in homes]


def _packed(blocks: Sequence[_Block]) -> list[list[int]]:
    """Blocks put into as few lines as first-fit finds, none longer than the longest block."""
    order = sorted(range(len(blocks)), key=lambda n: -blocks[n].length)
    lengths = [blocks[number].length for number in order]
    return [[order[place] for place in line] for line in _first_fit(lengths, lengths[0])]


def _first_fit(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Places of `sizes`, each put into the first bin in which there is still room for it."""
    bins: list[list[int]] = []
    left: list[int] = []
    for place, size in enumerate(sizes):
        number = next((k for k, free in enumerate(left) if free >= size), len(bins))
        if number == len(bins):
            bins.append([])
            left.append(room)
        bins[number].append(place)
        left[number] -= size
    return bins


def _inputs(
    lines: Sequence[Sequence[_Block]], width: int, shared: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, positions and attention mask of the lines, padded on the right."""
    ids, positions, block_of, branch_of = [], [], [], []
    for line in lines:
        tokens: list[int] = []
        places: list[int] = []
        blocks: list[int] = []
        branches: list[int] = []
        for number, block in enumerate(line):
            for k, part in enumerate([block.trunk, *block.branches]):
                first = 0 if k == 0 else len(block.trunk)
                tokens += part
                places += range(first, first + len(part))
                blocks += [number] * len(part)
                branches += [k] * len(part)
        pad = width - len(tokens)
        ids.append(tokens + [0] * pad)
        positions.append(places + [0] * pad)
        block_of.append(blocks + [-1] * pad)
        branch_of.append(branches + [0] * pad)
    blocks_t, branches_t = torch.tensor(block_of), torch.tensor(branch_of)
    attention = _attention(blocks_t, branches_t, dtype) if shared else (blocks_t >= 0).long()
    return torch.tensor(ids), torch.tensor(positions), attention


def _attention(blocks: Tensor, branches: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive mask [B, 1, T, T]: a token sees what comes before it in its own prompt and completion. Padding
    sees padding, so that no row of the softmax is empty."""
    width = blocks.shape[1]
    before = torch.ones(width, width, dtype=torch.bool).tril()
    same_block = blocks[:, :, None] == blocks[:, None, :]
    visible = (branches[:, None, :] == 0) | (branches[:, :, None] == branches[:, None, :])
    allowed = before & same_block & visible
    lowest = torch.finfo(dtype).min
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, lowest)[:, None]


def _targets(
    rows: Sequence[Row], places: Sequence[_Place]
) -> tuple[list[tuple[int, int]], list[int], list[int], list[list[int]]]:
    """Row and column of every predicting place; place and id of every distinct trained token; the index."""
    place_of: dict[tuple[int, int], int] = {}
    number_of: dict[tuple[int, int], int] = {}
    index: list[list[int]] = []
    for row, place in zip(rows, places, strict=True):
        start = row.start
        numbers = []
        for offset in row.trained:
            before = offset - 1
            column = place.trunk + before if before < start else place.branch + before - start
            spot = place_of.setdefault((place.row, column), len(place_of))
            numbers.append(number_of.setdefault((spot, row.token_ids[offset]), len(number_of)))
        index.append(numbers)
    tokens = list(number_of)
    return list(place_of), [spot for spot, _ in tokens], [token for _, token in tokens], index
