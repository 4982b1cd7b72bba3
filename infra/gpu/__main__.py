"""`python -m infra.gpu`."""

import sys

from infra.gpu.cli import main

sys.exit(main())
