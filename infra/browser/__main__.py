"""`python -m infra.browser`: fetches the headless Chromium now, once; prints where its program lies."""

import sys

from infra.browser.install import install
from sapo.core.errors import SapoError, UserError


def main() -> int:
    """Install; returns the exit code."""
    try:
        print(install() / "chromium")
    except SapoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
