"""`python -m infra.kafka`."""

import sys

from infra.kafka.cli import main

if __name__ == "__main__":
    sys.exit(main())
