"""Which requests of a browser a page of this machine answers: those that no page of another site made."""

import re
from collections.abc import Mapping

_HERE = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?", re.ASCII)
"""What a browser may call this machine; any other name could resolve here, too."""


def foreign(method: str, headers: Mapping[str, str]) -> str | None:
    """Why a request is refused, or None: a browser would add to it the password or cookies that it has.

    Another port is another site here, though not to a browser's cookies. To follow a link from anywhere to a
    page of its own window is no harm. `headers` have lower-case names.
    """
    host, origin = headers.get("host", ""), headers.get("origin")
    if _HERE.fullmatch(host) is None:
        return "This machine is not called so here."
    goes = (method, headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest"))
    own = headers.get("sec-fetch-site", "none") in ("none", "same-origin")
    if origin not in (None, f"http://{host}") or not (own or goes == ("GET", "navigate", "document")):
        return "Not for pages of other sites."
    return None
