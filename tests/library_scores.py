"""What the untouched library says: run as a process with PYTHONHASHSEED=0, prints JSON. Not a test module.

For every recipe on standard input (`[dataset, config, seed, index]`): the question, a right answer, texts and
the library's scores for them, called directly with no guard in place.
"""

import contextlib
import io
import json
import sys
from collections import deque
from typing import Any

JUNK = [
    "",
    " ",
    "wrong",
    "0",
    "-1",
    "42",
    "[1, 2, 3]",
    "{}",
    '{"a": 1}',
    "None",
    "The answer is 42.",
    "1/2",
    "a, b",
]


def right_answer(dataset: str, entry: dict[str, Any]) -> str:
    """The stored answer, or one made from the metadata where none is stored."""
    meta = entry["metadata"]
    if entry["answer"] is not None:
        return str(entry["answer"])
    if dataset == "propositional_logic":
        return str(meta["example_answer"])
    if dataset == "rubiks_cube":
        return str(meta["example_correct_answer"])
    if dataset == "graph_color":
        return json.dumps(meta["possible_answer"])
    return {"rush_hour": solve_rush_hour, "boxnet": solve_boxnet}[dataset](meta)


def solve_rush_hour(meta: dict[str, Any]) -> str:
    """Shortest moves by breadth-first search over the library's own board."""
    from reasoning_gym.games.rush_hour import Board

    def places(moves: tuple[str, ...]) -> Any:
        board = Board(meta["board_config"])
        board.perform_moves(" ".join(moves))
        return board

    queue: deque[tuple[str, ...]] = deque([()])
    seen = set()
    while queue:
        moves = queue.popleft()
        board = places(moves)
        state = tuple(piece.position for piece in board._pieces)
        if state in seen:
            continue
        seen.add(state)
        if board.solved:
            return " ".join(moves)
        for number, piece in enumerate(board._pieces):
            if not piece.fixed:
                queue.extend((*moves, f"{chr(ord('A') + number)}{step}") for step in ("+1", "-1"))
    raise AssertionError("the puzzle has no solution")


def solve_boxnet(meta: dict[str, Any]) -> str:
    """Walk every box square by square to a target of its colour, then match them."""
    where = {square: list(items) for square, items in meta["initial_state"].items()}
    steps = []
    for start, items in meta["initial_state"].items():
        for box in [item for item in items if item.startswith("box_")]:
            target = "target_" + box[4:]
            goal = next(square for square, held in where.items() if target in held)
            where[goal].remove(target)
            row, column = map(float, start.split("_"))
            to_row, to_column = map(float, goal.split("_"))
            while (row, column) != (to_row, to_column):
                agent = f"Agent[{row}, {column}]"
                if row != to_row:
                    row += 1 if to_row > row else -1
                else:
                    column += 1 if to_column > column else -1
                steps.append({agent: f"move({box}, square[{row}, {column}])"})
            steps.append({f"Agent[{row}, {column}]": f"move({box}, {target})"})
    return json.dumps(steps)


def variants(right: str) -> list[str]:
    """The right answer first, then texts near it, as lists too, then junk."""
    rows = [row.split() for row in right.split("\n")]
    numbers = [[int(cell) if cell.isdigit() else cell for cell in row] for row in rows]
    near = [right + " ", "The answer is " + right, right[:-1], right[::-1], right.upper(), right + right]
    near += [repr(right), repr(rows), repr(numbers), repr(right.split()), repr(list(right)), f"({right})*1"]
    return [right, *near, *JUNK]


def main() -> None:
    """Answer the recipes on standard input."""
    recipes = json.load(sys.stdin)
    result = []
    with contextlib.redirect_stdout(io.StringIO()):
        import reasoning_gym

        from sapo.tasks.gym import seed_globals

        for dataset, config, seed, index in recipes:
            seed_globals((dataset, config, seed, index))
            params = json.loads(config)
            if dataset == "composite":
                from reasoning_gym.composite import DatasetSpec

                params["datasets"] = [DatasetSpec(**item) for item in params["datasets"]]
            source = reasoning_gym.create_dataset(dataset, seed=seed, **params)
            entry = source[index]
            texts = variants(right_answer(dataset, entry))
            result.append(
                {
                    "question": entry["question"],
                    "texts": texts,
                    "scores": [score(source, entry, t) for t in texts],
                }
            )
    json.dump(result, sys.stdout)


def score(source: Any, entry: dict[str, Any], text: str) -> float | str:
    """The library's score, or the name of what its scorer raised after `error: `."""
    try:
        return float(source.score_answer(text, entry))
    except Exception as error:
        return f"error: {type(error).__name__}"


if __name__ == "__main__":
    main()
