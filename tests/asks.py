"""Questions that are put to members, without the swarm they would come from."""

from sapo.core.types import Question, Recipe
from sapo.node.member.answer_book import Ask


def ask(place: int = 0, wanted: int = 4, text: str = "") -> Ask:
    """A question that needs answers."""
    recipe = Recipe(dataset="made_up", seed=0, index=place)
    return Ask(place, Question(recipe=recipe, text=text or f"question {place}", bucket=0.5), wanted)


def asks(many: int, wanted: int = 2) -> list[Ask]:
    """Several questions, at places from 0 on."""
    return [ask(place, wanted) for place in range(many)]


def never() -> bool:
    """Nobody stops the member."""
    return False
