"""Errors a person can act on: each names the field, the value and the remedy."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sapo.core.unicode import one_line, printable

if TYPE_CHECKING:
    from sapo.core.types import Group


class SapoError(Exception):
    """Base of the errors this package raises on purpose. They pass from process to process whole."""

    def __str__(self) -> str:
        """The message, which may repeat what others wrote: it cannot steer the terminal that shows it."""
        return printable(super().__str__())

    def __reduce__(self) -> tuple[Any, ...]:
        """Made again without `__init__`, whose arguments are not the message that `args` holds."""
        return _made_again, (type(self), self.args), self.__dict__


def _made_again(kind: type[SapoError], args: tuple[Any, ...]) -> SapoError:
    return kind.__new__(kind, *args)


class UserError(SapoError):
    """Bad input. The command line prints it as one line and exits with code 2.

    `field` is the option, key or path at fault, `value` what was given there,
    `problem` what is wrong with it and `remedy` what to do instead. A `value` of None means that none
    was given; the line then leaves it out. Of a name or value that somebody else made very long it has the
    beginning.
    """

    def __init__(self, field: str, value: object, problem: str, remedy: str) -> None:
        self.field, self.value, self.problem, self.remedy = field, value, problem, remedy
        given = "" if value is None else f" = {_beginning(repr(value), 1000)}"
        super().__init__(f"{_beginning(field, 200)}{given}: {problem}; {remedy}")


def _beginning(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} ..."


class Paused(SapoError):
    """A guard or a bound stopped the node; it goes on when it is started again."""


class Unavailable(SapoError):
    """A service (bus, history store, tracking server) cannot be reached now; trying later may work."""


class LibraryFailed(Unavailable):
    """The library of a service raised what it does not document: tried again, as if the service were away."""


@contextmanager
def library_errors(service: str) -> Iterator[None]:
    """Turn what a service's library raises in the block into `LibraryFailed`; this package's errors pass."""
    try:
        yield
    except SapoError:
        raise
    except Exception as error:
        raise LibraryFailed(f"{service}: {described(error)}") from error


def described(error: BaseException, most: int = 500) -> str:
    """An error's type and text as one printable line, whoever wrote it. Raises `MemoryError` only."""
    try:
        text = str(error)
    except MemoryError:
        raise
    except Exception:
        text = ""
    return one_line(f"{type(error).__name__}: {text}" if text else type(error).__name__, most)


class Refused(SapoError):
    """Something a peer sent is not taken.

    `code` is a short snake_case reason (counted in metrics, stored in quarantine), `detail` adds to it.
    `group` is the refused group where its signature held, so that what is refused can be described. `proven`
    means that it counts against its author, whatever the code.
    """

    def __init__(
        self, code: str, detail: str = "", group: "Group | None" = None, proven: bool = False
    ) -> None:
        self.code, self.detail, self.group, self.proven = code, detail, group, proven
        super().__init__(f"{code}: {detail}" if detail else code)
