"""`python -m benchmarks.gpu`."""

import sys

from .cli import main

sys.exit(main())
